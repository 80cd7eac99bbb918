"""Script: a real worker trains, saves, resumes and exports, on the CPU or on the pretended device.

Usage: worker_cases.py OUT CASE..., under torchrun; a case is LAYOUT-DTYPE, such as ep2-bfloat16.
Started by `python -m tests.lab.pretended_device`, it runs on the device. Each rank writes
OUT/CASE-RANK.pt: metrics, gradients, weights and host waits, all on the CPU.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

from megatron_rl.mcore import compat

compat.install()

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.losses import open_loss
from megatron_rl.mcore import parallel
from megatron_rl.mcore.checkpoint import gather_tensors, load_tensors, write_tensors
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.models.families import read_shape
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.run.build_worker import build_worker
from megatron_rl.training.worker import Worker
from tests.distributed.worker_steps import store_rollouts
from tests.support.policies import COLUMN_ADDITION
from tests.support.workers import ALLOW_RANDOM_ROUTES, configure

LAYOUTS = {
    "single": ("parallel=single",),
    "ep2": ("parallel=ep2",),
    "pp2": ("parallel=pp2",),
    "tp2": ("parallel.tp=2",),
    "cp2": ("parallel.cp=2",),
}


def main() -> None:
    out, *cases = sys.argv[1:]
    for _, same_layout in itertools.groupby(cases, lambda case: case.split("-")[0]):
        names = list(same_layout)
        layout = parallel.initialize(settings_of(names[0], Path(out)).parallel, seed=0)
        for name in names:
            result = run_case(settings_of(name, Path(out)), layout, Path(out) / name)
            torch.save(result, Path(out) / f"{name}-{layout.rank}.pt")
        parallel_state.destroy_model_parallel()
    parallel.shutdown()


def settings_of(case: str, out: Path) -> Configuration:
    layout, dtype = case.split("-")
    return configure(
        COLUMN_ADDITION,
        out,
        *LAYOUTS[layout],
        "model.init=checkpoint",
        f"model.dtype={dtype}",
        "model.recompute=full",
        "train.tokens_per_micro_batch=64",
        "train.optimizer_steps_per_batch=2",
        "train.replay_measure_every=1",
        "optimizer.lr=1e-3",
        "optimizer.warmup_steps=1",
        "optimizer.clip_grad=0.05",
        "rollout.max_new_tokens=32",
        "data.max_prompt_tokens=16",
        ALLOW_RANDOM_ROUTES,
    )


def run_case(c: Configuration, layout: RankLayout, scratch: Path) -> dict[str, Any]:
    """Train a step, save, train another; then load what was saved and repeat the second step."""
    worker = open_worker(c, layout, scratch)
    gradients = GradientLog(worker)
    plans, store = make_plans(c, worker)
    first = train(worker, plans[0])
    save(worker, scratch / "checkpoint", layout)
    second = train(worker, plans[1])
    weights = export(worker)
    worker.save(scratch / "weights")
    resumed_worker = open_worker(c, layout, scratch)
    load_tensors(
        resumed_worker.policy.models,
        resumed_worker.optimizer,
        scratch / "checkpoint",
        optimizer_steps=2,
    )
    repeat = train(resumed_worker, plans[1])
    resumed_weights = export(resumed_worker)
    store.release(["group"])
    return {
        "steps": [first, second, repeat],
        "gradients": gradients.entries,
        "weights": weights,
        "resumed_weights": resumed_weights,
        "device": str(next(worker.policy.models[0].parameters()).device),
    }


def open_worker(c: Configuration, layout: RankLayout, scratch: Path) -> Worker:
    shape = read_shape(c.model.path)
    return build_worker(c, shape, open_loss(c.algo, shape), layout, scratch / "rollouts")


def make_plans(c: Configuration, worker: Worker) -> tuple[list[StepPlan], Any]:
    """Plans of two steps over 12 rollouts in rank 0's memory, and the store that holds them."""
    store, refs = store_rollouts(worker, 12)
    advantages = [(-1.0) ** i for i in range(len(refs))]
    planner = StepPlanner(c.train, c.parallel, dp_size=worker.layout.dp_size, seed=0)
    return [planner.plan(step, refs, advantages) for step in (0, 1)], store


def train(worker: Worker, plan: StepPlan) -> dict[str, float]:
    outcome = worker.train(plan)
    assert outcome.finite and outcome.optimizer_steps == 2
    return outcome.metrics.values()


def save(worker: Worker, directory: Path, layout: RankLayout) -> None:
    if layout.rank == 0:
        directory.mkdir(parents=True)
    dist.barrier(layout.control_group)
    tensors = gather_tensors(worker.policy.models, worker.optimizer)
    write_tensors(tensors, directory, layout.control_group)
    dist.barrier(layout.control_group)


def export(worker: Worker) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in worker.export().stream_all()}


class GradientLog:
    """Copies every gradient of a worker before each optimizer step."""

    def __init__(self, worker: Worker) -> None:
        self.entries: list[list[torch.Tensor]] = []
        step = worker.optimizer.step

        def log_and_step(**options: Any) -> Any:
            parameters: list[Any] = [
                p for model in worker.policy.models for p in model.parameters()
            ]
            self.entries.append([p.main_grad.cpu().clone() for p in parameters])
            return step(**options)

        worker.optimizer.step = log_and_step  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
