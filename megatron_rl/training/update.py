"""The update: optimizer steps over the micro-batches of one rollout batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.mcore.optimizer import DistributedAdam, StepResult
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.micro_batches import MicroBatch
from megatron_rl.training.old_policy import BatchObjective
from megatron_rl.training.policy import Policy


def update_policy(
    policy: Policy,
    optimizer: DistributedAdam,
    batches: Sequence[MicroBatch],
    objectives: Sequence[BatchObjective],
    denominators: Denominators,
    *,
    reference_logprobs: Sequence[torch.Tensor] = (),
    dp_size: int,
    first_step: bool,
    metrics: MetricSums,
    max_norm: float | None = None,
) -> StepResult:
    """Run one optimizer step: forward, backward, collective check, AdamW.

    No rank applies the step if a rank found NaN or Inf, or replayed routes other than the recorded
    ones, or if the norm of the gradients exceeds `max_norm`.

    objectives: of `batches`, in order.
    reference_logprobs: of the trained tokens of each micro-batch, [T]. Empty without a KL penalty.
    first_step: True if no weight has changed since the old-policy pass. Ratios other than 1 are
    then noise, which is measured.

    `train/loss` is the sum over data-parallel ranks (each adds its local part with weight
    1 / dp_size), averaged over the optimizer steps of the batch.
    """

    def policy_loss(logits: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        logprob, entropy = policy.logprobs(logits, batches[index])
        result = policy.regularization.add(
            objectives[index](logprob, entropy, denominators),
            logprob,
            entropy,
            reference_logprobs=reference_logprobs[index] if reference_logprobs else None,
            weights=batches[index].weights,
            denominators=denominators,
        )
        noise = objectives[index].deviation(logprob) if first_step else {}
        metrics.add(result.sums, result.maxima | noise)
        return result.loss, result.loss.detach().clone()

    optimizer.zero_grad()
    losses = run_schedule(
        policy.models,
        [batch.inputs for batch in batches],
        policy_loss,
        forward_only=False,
        replay=policy.replay,
    )
    total = float(sum(losses)) if losses else 0.0  # the host waits for all passes here, once
    if losses:
        metrics.add_mean("train/loss", total, 1.0 / dp_size)
    is_finite = math.isfinite(total)
    return _apply(policy, optimizer, metrics, loss_is_finite=is_finite, max_norm=max_norm)


def _apply(
    policy: Policy,
    optimizer: DistributedAdam,
    metrics: MetricSums,
    *,
    loss_is_finite: bool,
    max_norm: float | None,
) -> StepResult:
    """Apply the gradients unless a loss, a replayed route or the norm is at fault. Collective.

    metrics: receives the norm of gradients that were applied.
    """
    has_replay_faults = policy.replay is not None and policy.replay.has_faults
    is_finite = loss_is_finite and not has_replay_faults
    result = optimizer.step(loss_is_finite=is_finite, max_norm=max_norm)
    if result.is_applied:
        metrics.add_mean("train/grad_norm", result.grad_norm, 1.0)
    return result
