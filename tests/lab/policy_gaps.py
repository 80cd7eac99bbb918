"""Differences of engine, old and current policy over one batch, with each way to replay routes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import torch

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.losses import rollout_mismatch
from megatron_rl.mcore.replay import RouteReplay
from megatron_rl.mcore.router_target import Routing
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.micro_batches import MicroBatch
from megatron_rl.training.old_policy import compute_old_policy
from megatron_rl.training.policy import Policy
from megatron_rl.training.replay.update_routes import with_routes
from megatron_rl.training.update import update_policy
from megatron_rl.training.worker import Worker

_TAIL = 0.999
# Rounding error of a share times a count that is a whole number
_ROUNDING = 1e-6


class Gap(msgspec.Struct, frozen=True):
    """Difference of two policies a and b over the tokens of a batch, in nats.

    mean: mean of |log π_a(y_t) - log π_b(y_t)|.
    tail: the value that 99.9 % of them do not exceed.
    k3: estimate of KL(π_b ‖ π_a) by k3 = r - 1 - log r with r = π_a / π_b.
    extreme: share of the tokens whose probabilities differ by more than a factor of 2.
    """

    mean: float
    tail: float
    k3: float
    extreme: float

    @classmethod
    def between(cls, a: torch.Tensor, b: torch.Tensor) -> Gap:
        """Measure log-probabilities a and b [T] of the same tokens, at least one."""
        sizes = (a - b).abs().sort().values
        total, count = rollout_mismatch(a, b)["mismatch/k3_kl"].tolist()
        index = math.ceil(_TAIL * len(sizes) - _ROUNDING) - 1
        return cls(
            mean=float(sizes.mean()),
            tail=float(sizes[index]),
            k3=total / count,
            extreme=float((sizes > math.log(2)).double().mean()),
        )


class Gaps(msgspec.Struct, frozen=True):
    """Gaps of one batch, by the way of replay: "off", "trainer" or "rollout".

    A model without experts has "off" only.

    tokens: number of tokens that were compared.
    engine_old: gaps between engine and old policy.
    old_current: gaps between old and current policy.
    disagreement: share of rows and layers where the trainer's router would have chosen other
        experts than the engine's. None for a model without experts.
    """

    tokens: int
    engine_old: dict[str, Gap]
    old_current: dict[str, Gap]
    disagreement: float | None


def measure_gaps(worker: Worker, plan: StepPlan, rollouts: Mapping[int, Rollout]) -> Gaps:
    """Train a worker of one rank by one plan, and compare the policies before and after.

    The old policy has the weights before all optimizer steps, and the current policy those after
    them. The steps replay the routes of the engine in every case, so the cases have the same
    weights and differ only in how both policies are evaluated.

    rollouts: rollouts by their index in the plan.
    """
    policy = worker.policy
    steps = worker.batcher.optimizer_steps(plan, 0, rollouts)
    batches = [batch for step in steps for batch in step]
    engine_logprobs = torch.cat([batch.rollout_logprobs for batch in batches])
    old = {"off": evaluate(policy, batches, "record")}
    trainer_batches = batches
    disagreement = None
    if policy.replay is not None:
        routes = policy.replay.take_recorded_routes(len(batches))
        trainer_batches = list(with_routes([batches], routes)[0])
        old["trainer"] = old["off"]
        old["rollout"] = evaluate(policy, batches, "replay")
        disagreement = _disagreement(policy.replay)
    _update(worker, plan, steps, batches)
    current = {"off": evaluate(policy, batches, "live")}
    if policy.replay is not None:
        current["trainer"] = evaluate(policy, trainer_batches, "replay")
        current["rollout"] = evaluate(policy, batches, "replay")
        _require_no_faults(policy.replay)
    return Gaps(
        tokens=len(engine_logprobs),
        engine_old=_gaps(old, dict.fromkeys(old, engine_logprobs)),
        old_current=_gaps(current, old),
        disagreement=disagreement,
    )


def _gaps(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> dict[str, Gap]:
    """The gaps between log-probabilities of the same name."""
    return {name: Gap.between(logprobs, b[name]) for name, logprobs in a.items()}


def _disagreement(replay: RouteReplay) -> float:
    differences, rows = replay.disagreement()
    return differences / rows


def _require_no_faults(replay: RouteReplay) -> None:
    faults = replay.take_faults()
    if faults:
        raise Failure(f"the measurement is invalid: {faults}", ExitCode.SYNC_MISMATCH)


def evaluate(policy: Policy, batches: Sequence[MicroBatch], routing: Routing) -> torch.Tensor:
    """Log-probabilities [T] of the batches in one forward-only pass."""

    def logprobs_of(logits: torch.Tensor, index: int) -> tuple[None, torch.Tensor]:
        return None, policy.logprobs(logits, batches[index])[0].detach()

    logprobs = run_schedule(
        policy.models,
        [batch.inputs for batch in batches],
        logprobs_of,
        forward_only=True,
        replay=policy.replay,
        routing=routing,
        measure_routes=policy.replay is not None and routing == "replay",
    )
    return torch.cat(logprobs)


def _update(
    worker: Worker,
    plan: StepPlan,
    steps: Sequence[Sequence[MicroBatch]],
    batches: Sequence[MicroBatch],
) -> None:
    """Apply all optimizer steps of the plan."""
    metrics = MetricSums()
    objectives = iter(compute_old_policy(worker.policy, batches, metrics))
    for optimizer_step, step_batches in zip(plan.optimizer_steps, steps, strict=True):
        update_policy(
            worker.policy,
            worker.optimizer,
            step_batches,
            [next(objectives) for _ in step_batches],
            optimizer_step.denominators,
            dp_size=1,
            first_step=False,
            metrics=metrics,
        )
