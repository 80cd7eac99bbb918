"""Save and resume: a worker that goes on from a checkpoint does what the one did that never
stopped.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from megatron_rl.mcore import compat

compat.install()

import torch

from launch.gpu_stages.stage import Report, Setting, run
from launch.gpu_stages.workers import (
    ROUTES_OF_NOBODY,
    configure,
    make_rollouts,
    open_worker,
    write_model,
)
from megatron_rl.mcore import parallel
from megatron_rl.mcore.checkpoint import gather_tensors, load_tensors, write_tensors
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.training.worker import Worker


def state(setting: Setting, report: Report) -> None:
    """One step, save, a second step; then a fresh worker, load, and the second step again."""
    # attention's backward pass adds atomically unless told not to
    torch.use_deterministic_algorithms(torch.cuda.is_available(), warn_only=True)
    small = setting.small
    shape = write_model(
        setting.scratch / "model", small=small, layers=1, vocabulary=512 if small else 32_000
    )
    c = configure(
        setting.scratch / "model",
        setting.scratch,
        "train.optimizer_steps_per_batch=1",
        ROUTES_OF_NOBODY,
    )
    _store, refs, advantages = make_rollouts(
        shape, 4, prompt=16, response=48 if small else 480, seed=0
    )
    planner = StepPlanner(c.train, c.parallel, dp_size=1, seed=0)
    plans = [planner.plan(step, refs, advantages) for step in (0, 1)]
    worker = open_worker(c, setting.scratch)
    worker.train(plans[0])
    target = setting.scratch / "saved"
    target.mkdir()
    start = time.perf_counter()
    write_tensors(
        gather_tensors(worker.policy.models, worker.optimizer), target, worker.layout.control_group
    )
    report.note("save_s", round(time.perf_counter() - start, 2))
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    report.note("saved_gib", round(size / 2**30, 3))
    expected = _step(worker, plans[1])
    parallel.shutdown()
    _resume(setting, target, c, plans, expected, report)


def _resume(
    setting: Setting,
    target: Path,
    c: object,
    plans: list[object],
    expected: dict[str, torch.Tensor],
    report: Report,
) -> None:
    reseeded = dataclasses.replace(c, seed=7)  # type: ignore[type-var]
    worker = open_worker(reseeded, setting.scratch)
    start = time.perf_counter()
    load_tensors(worker.policy.models, worker.optimizer, target, optimizer_steps=1)
    report.note("load_s", round(time.perf_counter() - start, 2))
    resumed = _step(worker, plans[1])
    report.holds(
        "resumed_equals_uninterrupted",
        all(torch.equal(resumed[name], t) for name, t in expected.items()),
    )
    worst = max(
        float((resumed[name].float() - t.float()).abs().max()) for name, t in expected.items()
    )
    report.note("largest_difference", worst)
    parallel.shutdown()


def _step(worker: Worker, plan: object) -> dict[str, torch.Tensor]:
    """Train one step; every weight afterwards, on the CPU."""
    worker.train(plan)  # type: ignore[arg-type]
    return {name: tensor.cpu().clone() for name, tensor in worker.export()}


if __name__ == "__main__":
    run(state)
