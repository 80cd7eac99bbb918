"""How far engine, old and current policy are apart over one batch, with each way to replay routes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import torch

from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.losses import rollout_mismatch
from megatron_rl.mcore.router_target import ReplayError, Routing
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.micro_batches import MicroBatch
from megatron_rl.training.old_policy import compute_old_policy
from megatron_rl.training.policy import Policy
from megatron_rl.training.update import update_policy
from megatron_rl.training.replay.update_routes import with_routes
from megatron_rl.training.worker import Worker

_TAIL = 0.999
_ROUNDING = 1e-6  # of a share times a count that is a whole number


class Gap(msgspec.Struct, frozen=True):
    """Of |log π_a(y_t) - log π_b(y_t)|, nats: the mean and the value that 99.9 % do not exceed;
    KL(π_b ‖ π_a) by k3.

    extreme: share of the tokens whose probabilities differ by more than a factor of 2.
    """

    mean: float
    tail: float
    k3: float
    extreme: float

    @classmethod
    def between(cls, a: torch.Tensor, b: torch.Tensor) -> Gap:
        """a, b: log-probabilities [T] of the same tokens, T at least 1."""
        size = (a - b).abs().sort().values
        total, count = rollout_mismatch(a, b)["mismatch/k3_kl"].tolist()
        place = math.ceil(_TAIL * len(size) - _ROUNDING) - 1
        return cls(
            float(size.mean()),
            float(size[place]),
            total / count,
            float((size > math.log(2)).double().mean()),
        )


class Gaps(msgspec.Struct, frozen=True):
    """By replay, "off", "trainer" and "rollout"; only "off" of a model without experts. tokens:
    that were compared.

    disagreement: share of rows and layers where the trainer's router would have chosen otherwise
    than the engine's.
    """

    tokens: int
    engine_old: dict[str, Gap]
    old_current: dict[str, Gap]
    disagreement: float | None


def measure_gaps(worker: Worker, plan: StepPlan, rollouts: Mapping[int, Rollout]) -> Gaps:
    """Trains a worker of one rank by one plan, and compares policies before and after with the same
    weights.

    The old policy is that of the plan's start; the current one that of its end, after all its
    optimizer steps. These replay the engines' routes, in every row of the table: the rows differ by
    how both policies are evaluated alone. rollouts: by their index in the plan.
    """
    policy, replay = worker.policy, worker.policy.replay
    steps = worker.batcher.optimizer_steps(plan, 0, rollouts)
    flat = [batch for step in steps for batch in step]
    sampled = torch.cat([batch.rollout_logprobs for batch in flat])
    old, own, disagreement = {"off": evaluate(policy, flat, "record")}, flat, None
    if replay is not None:
        own = list(with_routes([flat], replay.take_recorded_routes(len(flat)))[0])
        old["trainer"] = old["off"]
        old["rollout"] = evaluate(policy, flat, "replay")
        differing, rows = replay.disagreement()
        disagreement = differing / rows
    _update(worker, plan, steps, flat)
    current = {"off": evaluate(policy, flat, "live")}
    if replay is not None:
        current["trainer"] = evaluate(policy, own, "replay")
        current["rollout"] = evaluate(policy, flat, "replay")
        if faults := replay.take_faults():
            raise ReplayError(f"the measurement is void: {faults}")
    return Gaps(
        tokens=len(sampled),
        engine_old={name: Gap.between(old[name], sampled) for name in old},
        old_current={name: Gap.between(current[name], old[name]) for name in current},
        disagreement=disagreement,
    )


def evaluate(policy: Policy, batches: Sequence[MicroBatch], routing: Routing) -> torch.Tensor:
    """The batches' log-probabilities [T] in one forward-only pass."""

    def keep(logits: torch.Tensor, index: int) -> tuple[None, torch.Tensor]:
        return None, policy.logprobs(logits, batches[index])[0].detach()

    packed = [batch.inputs for batch in batches]
    measured = policy.replay is not None and routing == "replay"
    found = run_schedule(
        policy.models,
        packed,
        keep,
        forward_only=True,
        replay=policy.replay,
        routing=routing,
        measure_routes=measured,
    )
    return torch.cat(found)


def _update(
    worker: Worker,
    plan: StepPlan,
    steps: Sequence[Sequence[MicroBatch]],
    flat: Sequence[MicroBatch],
) -> None:
    metrics = MetricSums()
    objectives = iter(compute_old_policy(worker.policy, flat, metrics))
    for planned, batches in zip(plan.optimizer_steps, steps, strict=True):
        prepared, counts = [next(objectives) for _ in batches], planned.denominators
        update_policy(
            worker.policy,
            worker.optimizer,
            batches,
            prepared,
            counts,
            dp_size=1,
            first_step=False,
            metrics=metrics,
        )
