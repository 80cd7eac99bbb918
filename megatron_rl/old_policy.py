"""The old policy: the trainer's own log-probabilities and entropies at the start of a step.

Invariant: computed once per rollout batch, from the micro-batches the update will reuse, before any parameter changes;
ratios, entropy groups and mismatch metrics all come from these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_rl.batching import MicroBatch
from megatron_rl.losses import PolicyLoss, ResponseTokens, rollout_mismatch
from megatron_rl.mcore.replay import RouteReplay
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.response_logprobs import ResponseLogprobs
from megatron_rl.watching.metric_sums import MetricSums


@dataclass(frozen=True)
class OldPolicy:
    """What the loss needs of one micro-batch besides the current log-probabilities."""

    response: ResponseTokens
    groups: object | None


def compute_old_policy(
    models: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    *,
    logprobs: ResponseLogprobs,
    loss: PolicyLoss,
    replay: RouteReplay | None,
    metrics: MetricSums,
) -> list[OldPolicy]:
    """Forward-only pass over all micro-batches of a step. Empty on ranks that are not the last pipeline stage."""

    def keep(logits: torch.Tensor, index: int) -> tuple[None, Any]:
        logprob, entropy = logprobs(logits, batches[index])
        return None, (logprob.detach(), entropy.detach())

    results = run_schedule(
        models, [b.packed for b in batches], keep, forward_only=True, replay=replay, measure_routes=replay is not None
    )
    if replay is not None:
        differing, total = replay.disagreement()
        metrics.add_mean("mismatch/route_disagreement", differing, total)
    return [_old_policy(batch, *result, loss, metrics) for batch, result in zip(batches, results, strict=False)]


def _old_policy(
    batch: MicroBatch, logprob: torch.Tensor, entropy: torch.Tensor, loss: PolicyLoss, metrics: MetricSums
) -> OldPolicy:
    response = ResponseTokens(
        old_logprobs=logprob,
        old_entropies=entropy,
        rollout_logprobs=batch.rollout_logprobs,
        advantages=batch.advantages,
        cu_seqlens=batch.cu_seqlens,
    )
    metrics.add_mean("policy/entropy", float(entropy.sum()), len(entropy))
    metrics.add(rollout_mismatch(logprob, batch.rollout_logprobs))
    return OldPolicy(response, loss.groups(response))
