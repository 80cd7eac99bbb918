"""Under torchrun: train a batch, save, train another; then load what was saved, in this layout and
in others.

Usage: checkpoint_layouts.py DIRECTORY SAVED:LOADED...; both are LAYOUTs of `support.layouts`, all
of this job's ranks. DIRECTORY holds the checkpoint `plain` and `rollouts`. Rank 0 saves what
each pair did in SAVED:LOADED.pt, in SAVED:.pt what the run did that was never stopped, and in
SAVED-model.pt what the model was that was saved; exported-SAVED is what was exported of it by all
ranks, which share neither vocabulary nor experts then.
"""

import sys
from pathlib import Path

from megatron_rl.mcore import compat

compat.install()

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from launch.testbed.packed_sequences import pack
from launch.testbed.policies import make_planner
from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.credit.assign import Credit
from megatron_rl.mcore import parallel
from megatron_rl.mcore.checkpoint import (
    SavedWeights,
    gather_tensors,
    load_random_state,
    load_tensors,
    random_state,
    write_hf,
    write_tensors,
)
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.models.families import read_shape
from megatron_rl.rollouts.store import RolloutStore
from megatron_rl.training.worker import Worker
from tests.distributed.whole_steps import build, locate
from tests.support.judged_batches import judged_groups
from tests.support.layouts import ALGORITHMS, BATCH, LAYOUTS, STEPS_PER_BATCH, LayoutCase
from tests.support.recordings import read_rollouts

SEQUENCES = range(8)
BUCKET = 40_000  # bytes; the model has 300,000


def train(
    worker: Worker, case: LayoutCase, layout: RankLayout, directory: Path, batch: int
) -> dict[str, float]:
    store = RolloutStore(node=0)
    mine = read_rollouts(directory / "rollouts")[batch * BATCH : (batch + 1) * BATCH]
    credit = Credit(ALGORITHMS[case.algorithm], seed=0)
    credited = credit.assign(batch, judged_groups(mine, locate(layout, store, mine, batch)))
    planner = make_planner(
        LAYOUTS[case.layout].parallel,
        layout,
        optimizer_steps_per_batch=STEPS_PER_BATCH,
        tokens_per_micro_batch=40,
    )
    outcome = worker.train(planner.plan(batch, credited.rollouts, credited.advantages))
    assert outcome.finite and outcome.optimizer_steps == STEPS_PER_BATCH
    return outcome.metrics.values()


def note(worker: Worker, metrics: dict[str, float], file: Path, adam_steps: set[int]) -> None:
    weights = {name: tensor.clone() for name, tensor in worker.export()}
    if worker.layout.rank == 0:
        torch.save({"metrics": metrics, "weights": weights, "adam_steps": sorted(adam_steps)}, file)


def adam_steps(worker: Worker) -> set[int]:
    return {group["step"] for group in worker.optimizer._optimizer.param_groups if group["params"]}


def save(case: LayoutCase, directory: Path) -> None:
    layout = parallel.initialize(LAYOUTS[case.layout].parallel, seed=0)
    worker, adam, _ = build(case, layout, directory)
    train(worker, case, layout, directory, 0)
    target = directory / f"saved-{case.layout}"
    if layout.rank == 0:
        (target / "rng").mkdir(parents=True)
    dist.barrier()
    write_tensors(gather_tensors(worker.policy.models, adam), target, layout.control_group)
    (target / "rng" / f"{layout.rank}.safetensors").write_bytes(random_state())
    note_model(worker, case, directory / f"{case.layout}-model.pt")
    drawn = torch.rand(3)
    load_random_state(target / "rng" / f"{layout.rank}.safetensors")
    assert torch.rand(3).equal(drawn)
    metrics = train(worker, case, layout, directory, 1)
    note(worker, metrics, directory / f"{case.layout}:.pt", adam_steps(worker))
    parallel_state.destroy_model_parallel()


def note_model(worker: Worker, case: LayoutCase, file: Path) -> None:
    """The weights, and the logits of some sequences where every rank computes all of them."""
    weights = {name: tensor.clone() for name, tensor in worker.export()}
    batch, logits = pack(SEQUENCES), None
    if LAYOUTS[case.layout].kind.axes <= {"ep"}:
        with torch.no_grad():
            logits = worker.policy.models[0](
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                attention_mask=None,
                packed_seq_params=batch.packed_seq_params(),
            )[0]
    if worker.layout.rank == 0:
        torch.save({"weights": weights, "logits": logits}, file)


def export(directory: Path, names: list[str]) -> None:
    """Both ranks write what each layout saved."""
    parallel.initialize(ParallelSettings(), seed=0)
    source, dtype = directory / "plain", torch.float32
    for name in names:
        model = ModelSettings(path=str(source))
        saved = SavedWeights(
            directory / f"saved-{name}", read_shape(source), model, bucket_bytes=BUCKET
        )
        write_hf(saved, directory / f"exported-{name}", source=source, dtype=dtype)
    parallel_state.destroy_model_parallel()


def load(case: LayoutCase, directory: Path, saved: str) -> None:
    layout = parallel.initialize(LAYOUTS[case.layout].parallel, seed=7)
    worker, adam, _ = build(case, layout, directory)
    load_tensors(
        worker.policy.models, adam, directory / f"saved-{saved}", optimizer_steps=STEPS_PER_BATCH
    )
    assert adam_steps(worker) == {STEPS_PER_BATCH}
    metrics = train(worker, case, layout, directory, 1)
    note(worker, metrics, directory / f"{saved}:{case.layout}.pt", adam_steps(worker))
    parallel_state.destroy_model_parallel()


def main() -> None:
    directory, pairs = Path(sys.argv[1]), [pair.split(":") for pair in sys.argv[2:]]
    names = list(dict.fromkeys(saved for saved, _ in pairs))
    for saved in names:
        save(LayoutCase(saved, "grpo"), directory)
    export(directory, names)
    for saved, loaded in pairs:
        load(LayoutCase(loaded, "grpo"), directory, saved)
    parallel.shutdown()


if __name__ == "__main__":
    main()
