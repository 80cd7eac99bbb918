"""Save and resume: what a checkpoint holds, and how a worker that loads it goes on."""

from __future__ import annotations

import dataclasses
import time
import traceback
from pathlib import Path
from typing import Any

from megatron_rl.mcore import compat

compat.install()

import torch

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.mcore import parallel
from megatron_rl.mcore.checkpoint import gather_tensors, load_tensors, write_tensors
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.training.worker import Worker
from tests.lab.gpu_stages.stage import Report, Setting, run
from tests.support.workers import (
    ALLOW_RANDOM_ROUTES,
    configure,
    make_rollouts,
    open_worker,
    write_model,
)

Tensors = dict[str, torch.Tensor]
# Of the change of the weights in the step. Rounding that differs changes few weights.
_MAX_RELATIVE_DIFFERENCE = 0.1


def state(setting: Setting, report: Report) -> None:
    """Train a step, save, and train another one; then load the checkpoint and repeat the second.

    A worker that loads it holds the saved bits. Its step equals the uninterrupted one bit for bit
    wherever the step has the same bits each time. A GPU may add in any order; there the steps
    agree within rounding.
    """
    c, shape = _configure(setting)
    response = 48 if setting.small else 480
    _store, refs, advantages = make_rollouts(shape, 4, prompt=16, response=response, seed=0)
    planner = StepPlanner(c.train, c.parallel, dp_size=1, seed=0)
    first_plan = planner.plan(0, refs, advantages)
    second_plan = planner.plan(1, refs, advantages)
    worker = _train_first(c, setting.scratch, first_plan, report)
    checkpoint = setting.scratch / "checkpoint"
    before = _saved_tensors(worker)
    _save(worker, checkpoint, report)
    reference = _train(worker, second_plan)
    parallel.shutdown()
    worker = _load(c, setting.scratch, checkpoint, report)
    report.require("loaded_equals_saved", not _differing_names(_saved_tensors(worker), before))
    result = _train(worker, second_plan)
    load_tensors(worker.policy.models, worker.optimizer, checkpoint, optimizer_steps=1)
    repetition = _train(worker, second_plan)
    compare_steps(result, reference, repetition, before, report)
    parallel.shutdown()


def _configure(setting: Setting) -> tuple[Configuration, ModelShape]:
    """Write the model, and configure a run over it."""
    model = setting.scratch / "model"
    # 63 million parameters on a GPU, whose state is copied several times
    changes = {} if setting.small else {"num_experts": 16}
    vocabulary = 512 if setting.small else 8_192
    shape = write_model(model, small=setting.small, layers=1, vocabulary=vocabulary, **changes)
    c = configure(model, setting.scratch, "train.optimizer_steps_per_batch=1", ALLOW_RANDOM_ROUTES)
    return c, shape


def _train_first(c: Configuration, scratch: Path, plan: StepPlan, report: Report) -> Worker:
    """Train the first step, with deterministic algorithms if no operation refuses them."""
    if not torch.cuda.is_available():
        worker = open_worker(c, scratch)
        worker.train(plan)
        return worker
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False
    # With `warn_only`, attention would keep its backward pass that adds atomically. Transformer
    # Engine's attention reads the setting when it is built.
    torch.use_deterministic_algorithms(True)
    try:
        worker = open_worker(c, scratch)
        worker.train(plan)
    except Exception as error:  # a library may lack deterministic kernels; other errors come again
        traceback.print_exc()
        report.note("not_deterministic", str(error).partition("\n")[0][:300])
    else:
        return worker
    torch.use_deterministic_algorithms(False)
    parallel.shutdown()
    worker = open_worker(c, scratch)
    worker.train(plan)
    return worker


def _saved_tensors(worker: Worker) -> Tensors:
    """Copy what a checkpoint holds: weights, master weights and moments, by name and shard.

    The copies are on the device of the model, which compares them faster than the host.
    """
    tensors = {}
    device = worker.layout.device
    state: dict[str, Any] = gather_tensors(worker.policy.models, worker.optimizer)
    for name, value in state.items():
        shards = getattr(value, "local_shards", None)
        parts = [value] if shards is None else [shard.tensor for shard in shards()]
        for index, part in enumerate(parts):
            data = getattr(part, "_sh_ten", part)
            tensors[f"{name} {index}"] = getattr(data, "data", data).detach().to(device, copy=True)
    return tensors


def _save(worker: Worker, checkpoint: Path, report: Report) -> None:
    checkpoint.mkdir()
    start = time.perf_counter()
    tensors = gather_tensors(worker.policy.models, worker.optimizer)
    write_tensors(tensors, checkpoint, worker.layout.control_group)
    report.note("save_s", round(time.perf_counter() - start, 2))
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    report.note("saved_gib", round(size / 2**30, 3))


def _load(c: Configuration, scratch: Path, checkpoint: Path, report: Report) -> Worker:
    """Open a worker with weights of another seed, and load the checkpoint."""
    worker = open_worker(dataclasses.replace(c, seed=7), scratch)
    start = time.perf_counter()
    load_tensors(worker.policy.models, worker.optimizer, checkpoint, optimizer_steps=1)
    report.note("load_s", round(time.perf_counter() - start, 2))
    return worker


def _train(worker: Worker, plan: StepPlan) -> Tensors:
    """Train one step and return what a checkpoint would hold afterwards."""
    worker.train(plan)
    return _saved_tensors(worker)


def _differing_names(tensors: Tensors, others: Tensors) -> list[str]:
    """Names of tensors that differ in a bit, or that one side lacks."""
    names = tensors.keys() ^ others.keys()
    return sorted(names) + [
        name
        for name in tensors.keys() & others.keys()
        if not torch.equal(tensors[name], others[name])
    ]


def compare_steps(
    result: Tensors, reference: Tensors, repetition: Tensors, before: Tensors, report: Report
) -> None:
    """Compare the resumed step with the uninterrupted one, as exactly as a repetition allows.

    before: at the checkpoint.
    """
    report.require("step_changes_weights", bool(_differing_names(reference, before)))
    has_fixed_bits = not _differing_names(repetition, result)
    report.note("compared", "bits" if has_fixed_bits else "within rounding")
    if has_fixed_bits:
        report.require("resumed_equals_uninterrupted", not _differing_names(result, reference))
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        names = [name for name in reference if name.startswith(f"optimizer.state.{kind}.")]
        difference = _distance(result, reference, names) / _distance(reference, before, names)
        report.require_at_most(
            f"{kind}_difference_over_change", difference, _MAX_RELATIVE_DIFFERENCE
        )


def _distance(tensors: Tensors, others: Tensors, names: list[str]) -> float:
    """The norm of the difference over all tensors of these names."""
    squares = [(tensors[name].double() - others[name].double()).square().sum() for name in names]
    return float(torch.stack(squares).sum().sqrt())


if __name__ == "__main__":
    run(state)
