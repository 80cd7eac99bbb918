"""The old policy: the trainer's own log-probabilities and entropies at the start of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.losses import Objective, ResponseTokens, rollout_mismatch
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.records.metric_sums import MetricSums
from megatron_rl.training.batch import MicroBatch
from megatron_rl.training.policy import Policy


def compute_old_policy(policy: Policy, batches: Sequence[MicroBatch], metrics: MetricSums) -> list[Objective]:
    """Forward-only pass over all micro-batches of a step: what the updates of each minimise.

    Empty on ranks that are not the last pipeline stage.
    """

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
    responses = [
        ResponseTokens(logprob, entropy, batch.rollout_logprobs, batch.advantages, batch.cu_seqlens)
        for batch, (logprob, entropy) in zip(batches, results, strict=False)
    ]
    for response in responses:
        metrics.add_mean("policy/entropy", float(response.old_entropies.sum()), len(response.old_entropies))
        metrics.add(rollout_mismatch(response.old_logprobs, response.rollout_logprobs))
    return [policy.loss.prepare(response) for response in responses]
