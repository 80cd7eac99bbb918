"""Training steps of a real worker over made-up rollouts.

Routes are replayed from the rollouts, chosen by the routers, or recorded by the old-policy pass.

It measures seconds, tokens a second and memory.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time

from megatron_rl.mcore import compat

compat.install()

import torch

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.mcore import parallel
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.rank_view import RankView
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.training.micro_batches import Batcher
from megatron_rl.training.worker import TrainOutcome, Worker
from tests.lab.gpu_stages.stage import Report, Setting, StageSkipped, run
from tests.support.workers import (
    ALLOW_RANDOM_ROUTES,
    configure,
    make_rollouts,
    open_worker,
    write_model,
)

# Of the large model: 2.4e9 parameters with 18 bytes of weights, gradients and optimizer state
# (40 GiB), three copies of the logits of a micro-batch (7 GiB), and its activations (20 GiB)
_BYTES_OF_LARGE_MODEL = 70 * 2**30
STEPS = 4


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Size of the batch, in tokens but for `count`."""

    micro_batch: int
    count: int
    prompt: int
    response: int


_SMALL_BATCH = _Batch(micro_batch=64, count=4, prompt=15, response=49)
_LARGE_BATCH = _Batch(micro_batch=8192, count=16, prompt=256, response=769)


def train(setting: Setting, report: Report) -> None:
    """Train a few steps of 16,384 tokens through 2.4 billion parameters.

    The small stage trains 252 tokens through some thousand parameters. With the choice `local`,
    layers are `model.spec=local` even where Transformer Engine is installed.
    """
    if "local" in setting.choices and setting.small:
        raise StageSkipped("on a CPU, the stage train has local layers")
    shape = _write_model(setting)
    batch = _SMALL_BATCH if setting.small else _LARGE_BATCH
    c = _configure(batch, setting)
    worker = open_worker(c, setting.scratch)
    _note_model(worker, report)
    _store, refs, advantages = make_rollouts(
        shape, batch.count, prompt=batch.prompt, response=batch.response, seed=0
    )
    plan = StepPlanner(c.train, c.parallel, dp_size=1, seed=0).plan(0, refs, advantages)
    tokens = sum(ref.num_inputs for ref in plan.rollouts)
    report.note("tokens", tokens)
    _measure("replayed", worker, plan, tokens, report)
    view = RankView.for_rank(shape.num_layers, c.parallel)
    _measure_own_routes(worker, view, plan, tokens, report)
    ratio = report.values["own_routes_step_s"] / report.values["live_step_s"]
    report.note("replay_cost", round(ratio - 1, 4))
    parallel.shutdown()


def _measure_own_routes(
    worker: Worker, view: RankView, plan: StepPlan, tokens: int, report: Report
) -> None:
    """Measure steps with the routers' own routes, without replay and with it.

    The routers of a random model choose few experts, and the rollouts' random routes all of them.
    The cost of replay shows where both steps have the same routes.
    """
    batcher = Batcher(view, None, worker.layout.device)
    own_replay = copy.copy(worker.policy.replay)
    assert own_replay is not None
    own_replay.source = "trainer"
    for name, replay in (("live", None), ("own_routes", own_replay)):
        policy = dataclasses.replace(worker.policy, replay=replay)
        other_worker = dataclasses.replace(worker, policy=policy, batcher=batcher)
        _measure(name, other_worker, plan, tokens, report)


def _configure(batch: _Batch, setting: Setting) -> Configuration:
    return configure(
        setting.scratch / "model",
        setting.scratch,
        f"train.tokens_per_micro_batch={batch.micro_batch}",
        "train.optimizer_steps_per_batch=1",
        ALLOW_RANDOM_ROUTES,
        f"rollout.max_new_tokens={batch.response}",
        f"data.max_prompt_tokens={batch.prompt}",
        f"model.spec={'local' if 'local' in setting.choices else 'null'}",
    )


def _write_model(setting: Setting) -> ModelShape:
    """Write the small model, or the largest one whose training fits this GPU."""
    layers = None
    if not setting.small:
        memory = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0
        layers = None if memory >= _BYTES_OF_LARGE_MODEL else 3
    return write_model(setting.scratch / "model", small=setting.small, layers=layers)


def _note_model(worker: Worker, report: Report) -> None:
    models = worker.policy.models
    parameters = sum(p.numel() for model in models for p in model.parameters())
    has_te = any("TE" in type(module).__name__ for module in models[0].modules())
    report.note("parameters", parameters)
    report.note("dtype", worker.model.dtype)
    report.note("spec", "te" if has_te else "local")


def _measure(name: str, worker: Worker, plan: StepPlan, tokens: int, report: Report) -> None:
    """Train `STEPS` steps and note their times and metrics."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for step in range(STEPS):
        start = time.perf_counter()
        outcome = worker.train(plan)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        report.require(f"{name}_finite", outcome.finite)
        if step == 0:
            deviation = outcome.metrics.values()["policy/first_ratio_deviation"]
            report.require_at_most(f"{name}_first_ratio_deviation", deviation, 0.0)
    _note_times(name, seconds, tokens, report)
    _note_outcome(name, outcome, report)


def _note_times(name: str, seconds: list[float], tokens: int, report: Report) -> None:
    typical = statistics.median(seconds[1:])  # The first step compiles kernels.
    report.note(f"{name}_step_s", round(typical, 4))
    report.note(f"{name}_tokens_s", round(tokens / typical))
    report.note(f"{name}_peak_gib", round(torch.cuda.max_memory_allocated() / 2**30, 2))


def _note_outcome(name: str, outcome: TrainOutcome, report: Report) -> None:
    sections = {key: round(value, 4) for key, value in outcome.seconds.items()}
    grad_norm = outcome.metrics.values()["train/grad_norm"]
    report.note(f"{name}_stages_s", sections)
    report.note(f"{name}_grad_norm", grad_norm)
    report.require(f"{name}_learns", grad_norm > 0)


if __name__ == "__main__":
    run(train)
