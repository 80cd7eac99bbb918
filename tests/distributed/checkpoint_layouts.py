"""Trains a batch, saves, and trains another batch; then loads the checkpoint in several layouts.

Runs under torchrun. Usage: checkpoint_layouts.py DIRECTORY SAVED:LOADED...

SAVED and LOADED are names of LAYOUTS in `tests.support.layouts`, for all ranks of this job.
DIRECTORY holds the checkpoint `plain` and the recording `rollouts`. Results:

SAVED:LOADED-loaded.pt: the weights after loading the checkpoint of layout SAVED in layout LOADED.
SAVED:LOADED.pt: the second batch after loading the checkpoint of layout SAVED in layout LOADED.
SAVED:.pt: the second batch without a stop, in layout SAVED.
SAVED-model.pt: the model when it was saved.
exported-SAVED: the export of the checkpoint by all ranks, without model parallelism.
"""

import sys
from pathlib import Path

from megatron_rl.mcore import compat

compat.install()

import torch
import torch.distributed as dist
from megatron.core import parallel_state

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
from megatron_rl.rollouts.wire.store import RolloutStore
from megatron_rl.training.worker import Worker
from tests.distributed.whole_steps import build, store_on_rank_0
from tests.support.judged_batches import judged_groups
from tests.support.layouts import ALGORITHMS, BATCH, LAYOUTS, STEPS_PER_BATCH, LayoutCase
from tests.support.packed_sequences import pack
from tests.support.policies import make_planner
from tests.support.recordings import read_rollouts

SEQUENCES = range(8)
BUCKET = 40_000  # bytes; the model has 300,000


def train(
    worker: Worker, case: LayoutCase, layout: RankLayout, directory: Path, batch: int
) -> dict[str, float]:
    """Train one batch of the recording and return its metrics."""
    store = RolloutStore(node=0)
    rollouts = read_rollouts(directory / "rollouts")[batch * BATCH : (batch + 1) * BATCH]
    groups = judged_groups(rollouts, store_on_rank_0(layout, store, rollouts, batch))
    batch_credit = Credit(ALGORITHMS[case.algorithm]).assign(groups)
    planner = make_planner(
        LAYOUTS[case.layout].parallel,
        layout,
        optimizer_steps_per_batch=STEPS_PER_BATCH,
        tokens_per_micro_batch=40,
    )
    plan = planner.plan(
        batch, batch_credit.rollouts, batch_credit.advantages, weights=batch_credit.weights
    )
    outcome = worker.train(plan)
    assert outcome.finite and outcome.optimizer_steps == STEPS_PER_BATCH
    return outcome.metrics.values()


def save_result(worker: Worker, metrics: dict[str, float], file: Path) -> None:
    """Save metrics, weights and Adam's counts of steps on rank 0. Collective."""
    weights = {name: tensor.clone() for name, tensor in worker.export().stream_all()}
    if worker.layout.rank == 0:
        result = {"metrics": metrics, "weights": weights, "adam_steps": sorted(adam_steps(worker))}
        torch.save(result, file)


def adam_steps(worker: Worker) -> set[int]:
    return {group["step"] for group in worker.optimizer._optimizer.param_groups if group["params"]}


def save(case: LayoutCase, directory: Path) -> None:
    """Train a batch, save a checkpoint, and train another batch."""
    layout = parallel.initialize(LAYOUTS[case.layout].parallel, seed=0)
    worker, adam, _ = build(case, layout, directory)
    train(worker, case, layout, directory, 0)
    checkpoint = directory / f"saved-{case.layout}"
    if layout.rank == 0:
        (checkpoint / "rng").mkdir(parents=True)
    dist.barrier()
    write_tensors(gather_tensors(worker.policy.models, adam), checkpoint, layout.control_group)
    random_file = checkpoint / "rng" / f"{layout.rank}.safetensors"
    random_file.write_bytes(random_state())
    save_model(worker, case, directory / f"{case.layout}-model.pt")
    samples = torch.rand(3)
    load_random_state(random_file)
    assert torch.rand(3).equal(samples)
    metrics = train(worker, case, layout, directory, 1)
    save_result(worker, metrics, directory / f"{case.layout}:.pt")
    parallel_state.destroy_model_parallel()


def save_model(worker: Worker, case: LayoutCase, file: Path) -> None:
    """Save the weights on rank 0, and logits if every rank computes all of them. Collective."""
    weights = {name: tensor.clone() for name, tensor in worker.export().stream_all()}
    batch = pack(SEQUENCES)
    logits = None
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
    """Export the checkpoint of each layout. The ranks share the buckets."""
    parallel.initialize(ParallelSettings(), seed=0)
    source = directory / "plain"
    shape = read_shape(source)
    model = ModelSettings(path=str(source))
    for name in names:
        weights = SavedWeights(directory / f"saved-{name}", shape, model, bucket_bytes=BUCKET)
        target = directory / f"exported-{name}"
        write_hf(weights, target, source=source, dtype=torch.float32)
    parallel_state.destroy_model_parallel()


def load(case: LayoutCase, directory: Path, saved_layout: str) -> None:
    """Load the checkpoint of another layout and train the second batch."""
    layout = parallel.initialize(LAYOUTS[case.layout].parallel, seed=7)
    worker, adam, _ = build(case, layout, directory)
    checkpoint = directory / f"saved-{saved_layout}"
    load_tensors(
        worker.policy.models,
        adam,
        checkpoint,
        optimizer_steps=STEPS_PER_BATCH,
        group=layout.control_group,
    )
    assert adam_steps(worker) == {STEPS_PER_BATCH}
    weights = {name: tensor.clone() for name, tensor in worker.export().stream_all()}
    if layout.rank == 0:
        torch.save({"weights": weights}, directory / f"{saved_layout}:{case.layout}-loaded.pt")
    metrics = train(worker, case, layout, directory, 1)
    save_result(worker, metrics, directory / f"{saved_layout}:{case.layout}.pt")
    parallel_state.destroy_model_parallel()


def main() -> None:
    directory = Path(sys.argv[1])
    pairs = [pair.split(":") for pair in sys.argv[2:]]
    names = list(dict.fromkeys(saved_layout for saved_layout, _ in pairs))
    for name in names:
        save(LayoutCase(name, "grpo"), directory)
    export(directory, names)
    for saved_layout, layout in pairs:
        load(LayoutCase(layout, "grpo"), directory, saved_layout)
    parallel.shutdown()


if __name__ == "__main__":
    main()
