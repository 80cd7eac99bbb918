"""Training steps of a real worker over made-up rollouts, with replay and without: seconds, tokens a
second, memory.
"""

from __future__ import annotations

import dataclasses
import statistics
import time

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
from megatron_rl.planning.rank_view import RankView
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.training.micro_batches import Batcher
from megatron_rl.training.worker import Worker

_ENOUGH_BYTES = (
    100 * 2**30
)  # of GPU memory for the large model, its gradients and its optimizer's state
STEPS = 4


def train(setting: Setting, report: Report) -> None:
    """A few steps of 16,384 tokens through 2.4 billion parameters (small: 252 tokens through some
    thousand).
    """
    small, cuda = setting.small, torch.cuda.is_available()
    fits = cuda and torch.cuda.get_device_properties(0).total_memory > _ENOUGH_BYTES
    shape = write_model(setting.scratch / "model", small=small, layers=None if small or fits else 3)
    micro_batch, count, prompt, response = (64, 4, 15, 49) if small else (8192, 16, 256, 769)
    c = configure(
        setting.scratch / "model",
        setting.scratch,
        f"train.tokens_per_micro_batch={micro_batch}",
        "train.optimizer_steps_per_batch=1",
        ROUTES_OF_NOBODY,
        f"rollout.max_new_tokens={response}",
        f"data.max_prompt_tokens={prompt}",
    )
    worker = open_worker(c, setting.scratch)
    report.note(
        "parameters", sum(p.numel() for model in worker.policy.models for p in model.parameters())
    )
    report.note("dtype", c.model.dtype)
    report.note(
        "spec",
        "te"
        if any("TE" in type(m).__name__ for m in worker.policy.models[0].modules())
        else "local",
    )
    _store, refs, advantages = make_rollouts(shape, count, prompt=prompt, response=response, seed=0)
    plan = StepPlanner(c.train, c.parallel, dp_size=1, seed=0).plan(0, refs, advantages)
    tokens = sum(ref.num_inputs for ref in plan.rollouts)
    report.note("tokens", tokens)
    live = dataclasses.replace(
        worker,
        policy=dataclasses.replace(worker.policy, replay=None),
        batcher=Batcher(RankView.for_rank(shape.num_layers, c.parallel), None, worker.layout.device),
    )
    for name, one in (("replayed", worker), ("live", live)):
        _measure(name, one, plan, tokens, report)
    report.note(
        "replay_cost", round(report.values["replayed_step_s"] / report.values["live_step_s"] - 1, 4)
    )
    parallel.shutdown()


def _measure(name: str, worker: Worker, plan: object, tokens: int, report: Report) -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds, stages = [], []
    for step in range(STEPS):
        start = time.perf_counter()
        outcome = worker.train(plan)  # type: ignore[arg-type]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        stages.append(outcome.seconds)
        values = outcome.metrics.values()
        report.holds(f"{name}_finite", outcome.finite)
        if step == 0:
            report.at_most(
                f"{name}_first_ratio_deviation", values["policy/first_ratio_deviation"], 0.0
            )
    best = statistics.median(seconds[1:])  # the first compiles kernels
    report.note(f"{name}_step_s", round(best, 4))
    report.note(f"{name}_tokens_s", round(tokens / best))
    report.note(f"{name}_stages_s", {key: round(value, 4) for key, value in stages[-1].items()})
    report.note(f"{name}_peak_gib", round(torch.cuda.max_memory_allocated() / 2**30, 2))
    report.note(f"{name}_grad_norm", values["train/grad_norm"])
    report.holds(f"{name}_learns", values["train/grad_norm"] > 0)


if __name__ == "__main__":
    run(train)
