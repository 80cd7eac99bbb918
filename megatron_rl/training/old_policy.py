"""The old policy: the trainer's own log-probabilities and entropies at the start of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.losses import PolicyLoss, ResponseTokens, rollout_mismatch
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.records.metric_sums import MetricSums
from megatron_rl.training.batch import MicroBatch
from megatron_rl.training.policy import Policy


@dataclass(frozen=True)
class OldPolicy:
    """What the loss needs of one micro-batch besides the current log-probabilities."""

    response: ResponseTokens
    groups: object | None


def compute_old_policy(policy: Policy, batches: Sequence[MicroBatch], metrics: MetricSums) -> list[OldPolicy]:
    """Forward-only pass over all micro-batches of a step. Empty on ranks that are not the last pipeline stage."""

    def keep(logits: torch.Tensor, index: int) -> tuple[None, tuple[torch.Tensor, torch.Tensor]]:
        logprob, entropy = policy.logprobs(logits, batches[index])
        return None, (logprob.detach(), entropy.detach())

    results = run_schedule(
        policy.models,
        [batch.packed for batch in batches],
        keep,
        forward_only=True,
        replay=policy.replay,
        measure_routes=policy.replay is not None,
    )
    if policy.replay is not None:
        metrics.add_mean("mismatch/route_disagreement", *policy.replay.disagreement())
    return [
        _old_policy(batch, logprob, entropy, policy.loss, metrics)
        for batch, (logprob, entropy) in zip(batches, results, strict=False)
    ]


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
