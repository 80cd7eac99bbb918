"""The old policy: the trainer's own log-probabilities and entropies at the start of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import LossResult, Objective, ResponseTokens, mean_of, rollout_mismatch
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.training.entropy_advantages import advantage_sizes, token_advantages
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.micro_batches import MicroBatch
from megatron_rl.training.policy import Policy


@dataclass(frozen=True)
class Prepared:
    """An `Objective` of one micro-batch with the log-probabilities, float32 [T], that its ratios
    start from.
    """

    objective: Objective
    old_logprobs: torch.Tensor

    def __call__(self, logprobs: torch.Tensor, denominators: Denominators) -> LossResult:
        return self.objective(logprobs, denominators)

    def deviation(self, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
        """The largest |π_θ(y_t) / π_old(y_t) - 1|, a scalar; nothing without tokens.

        Before the first optimizer step both are the same weights: what is left is noise of the
        arithmetic, and a clip width below it cuts tokens at random.
        """
        if logprobs.numel() == 0:
            return {}
        return {
            "policy/first_ratio_deviation": torch.expm1(logprobs.detach() - self.old_logprobs)
            .abs()
            .max()
        }


def compute_old_policy(
    policy: Policy, batches: Sequence[MicroBatch], metrics: MetricSums
) -> list[Prepared]:
    """Forward-only pass over all micro-batches of a step: what the updates of each minimise.

    Empty on ranks that are not the last pipeline stage.
    """

    def keep(logits: torch.Tensor, index: int) -> tuple[None, tuple[torch.Tensor, torch.Tensor]]:
        logprob, entropy = policy.logprobs(logits, batches[index])
        return None, (logprob.detach(), entropy.detach())

    replay = policy.replay
    routing = "replay" if replay is None else replay.old_policy_routing
    results = run_schedule(
        policy.models,
        [batch.packed for batch in batches],
        keep,
        forward_only=True,
        replay=replay,
        routing=routing,
        measure_routes=replay is not None and routing == "replay",
    )
    if replay is not None and routing == "replay":
        metrics.add_mean("mismatch/route_disagreement", *replay.disagreement())
    responses = [
        ResponseTokens(
            logprob,
            entropy,
            batch.rollout_logprobs,
            token_advantages(batch, entropy),
            batch.cu_seqlens,
        )
        for batch, (logprob, entropy) in zip(batches, results, strict=False)
    ]
    for batch, response in zip(batches, responses, strict=False):
        metrics.add(advantage_sizes(batch, response.advantages))
    for response in responses:
        metrics.add({"policy/entropy": mean_of(response.old_entropies)})
        metrics.add(rollout_mismatch(response.old_logprobs, response.rollout_logprobs))
        metrics.add(policy.correction.metrics(response))
    corrected = map(policy.correction.corrected, responses)
    return [
        Prepared(policy.loss.prepare(response), response.old_logprobs) for response in corrected
    ]
