"""Save and resume: a worker that resumes from a checkpoint continues bit for bit."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from megatron_rl.mcore import compat

compat.install()

import torch

from launch.gpu_stages.stage import Report, Setting, run
from launch.testbed.workers import (
    ALLOW_RANDOM_ROUTES,
    configure,
    make_rollouts,
    open_worker,
    write_model,
)
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.mcore import parallel
from megatron_rl.mcore.checkpoint import gather_tensors, load_tensors, write_tensors
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.training.worker import Worker


def state(setting: Setting, report: Report) -> None:
    """Train two steps and save between them; then load into a new worker and repeat the second."""
    # Without this the backward pass of attention adds atomically.
    torch.use_deterministic_algorithms(torch.cuda.is_available(), warn_only=True)
    vocabulary = 512 if setting.small else 32_000
    model = setting.scratch / "model"
    shape = write_model(model, small=setting.small, layers=1, vocabulary=vocabulary)
    c = configure(model, setting.scratch, "train.optimizer_steps_per_batch=1", ALLOW_RANDOM_ROUTES)
    response = 48 if setting.small else 480
    _store, refs, advantages = make_rollouts(shape, 4, prompt=16, response=response, seed=0)
    planner = StepPlanner(c.train, c.parallel, dp_size=1, seed=0)
    first_plan = planner.plan(0, refs, advantages)
    second_plan = planner.plan(1, refs, advantages)
    worker = open_worker(c, setting.scratch)
    worker.train(first_plan)
    checkpoint = setting.scratch / "checkpoint"
    _save(worker, checkpoint, report)
    reference = _train(worker, second_plan)
    parallel.shutdown()
    resumed_worker = _load(c, setting.scratch, checkpoint, report)
    _compare(_train(resumed_worker, second_plan), reference, report)
    parallel.shutdown()


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


def _train(worker: Worker, plan: StepPlan) -> dict[str, torch.Tensor]:
    """Train one step and return every weight afterwards, on the CPU."""
    worker.train(plan)
    return {name: tensor.cpu().clone() for name, tensor in worker.export().stream_all()}


def _compare(
    weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor], report: Report
) -> None:
    is_equal = all(torch.equal(weights[name], tensor) for name, tensor in others.items())
    report.require("resumed_equals_uninterrupted", is_equal)
    differences = [
        float((weights[name].float() - tensor.float()).abs().max())
        for name, tensor in others.items()
    ]
    report.note("largest_difference", max(differences))


if __name__ == "__main__":
    run(state)
