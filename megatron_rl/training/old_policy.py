"""The old policy: the trainer's own log-probabilities and entropies at the start of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import (
    LossResult,
    Objective,
    ResponseTokens,
    mean_of,
    mismatch_by_age,
    rollout_mismatch,
)
from megatron_rl.losses.sft import Sft
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.mcore.weights.parameters import unwrap
from megatron_rl.training.entropy_advantages import advantage_sizes, token_advantages
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.micro_batches import MicroBatch
from megatron_rl.training.policy import Policy


@dataclass(frozen=True)
class BatchObjective:
    """The objective of one micro-batch.

    response: the trained tokens that the objective was prepared for.
    has_old_policy: False if no pass computed the old policy's values. They are NaN until the
    micro-batch trains, and then come from the policy that it trained.
    observe: called with the current policy's log-probabilities and the result of each update.
    """

    objective: Objective
    response: ResponseTokens
    observe: Callable[[torch.Tensor, LossResult], None] | None = None
    has_old_policy: bool = True

    @property
    def old_logprobs(self) -> torch.Tensor:
        """The old policy's log-probabilities, float32 [T]. The ratios are relative to them."""
        return self.response.old_logprobs

    def __call__(
        self, logprobs: torch.Tensor, entropies: torch.Tensor, denominators: Denominators
    ) -> LossResult:
        result = self.objective(logprobs, denominators)
        if not self.has_old_policy:
            self.response.old_logprobs.copy_(logprobs.detach())
            self.response.old_entropies.copy_(entropies.detach())
            sums = result.sums | {"policy/entropy": mean_of(entropies)}
            result = replace(result, sums=sums)
        if self.observe is not None:
            self.observe(logprobs.detach(), result)
        return result

    def deviation(self, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the largest |π_θ(y_t) / π_old(y_t) - 1| as a metric, or nothing without tokens.

        Before the first optimizer step both policies have the same weights. The deviation is then
        arithmetic noise, and a clip range below it would clip tokens at random.
        """
        if logprobs.numel() == 0 or not self.has_old_policy:
            return {}
        deviations = torch.expm1(logprobs.detach() - self.old_logprobs).abs()
        return {"policy/first_ratio_deviation": deviations.max()}


def compute_old_policy(
    policy: Policy,
    batches: Sequence[MicroBatch],
    metrics: MetricSums,
    *,
    version: int | None = None,
) -> list[BatchObjective]:
    """Run a forward-only pass over all micro-batches of a step and return their objectives.

    The loss of supervised training reads no old policy: without replay it needs no pass.

    version: of the trainer's weights, for metrics by the age of tokens. None: without these.

    Returns an empty list unless this rank is of the last pipeline stage.
    """
    if policy.replay is None and isinstance(policy.loss, Sft):
        return _without_pass(policy, batches)
    outputs = _run_pass(policy, batches, metrics)
    responses = [
        ResponseTokens(
            logprob,
            entropy,
            batch.rollout_logprobs,
            token_advantages(batch, entropy),
            batch.cu_seqlens,
        )
        for batch, (logprob, entropy) in zip(batches, outputs, strict=False)
    ]
    _add_metrics(policy, batches, responses, metrics)
    if version is not None:
        _add_mismatch_by_age(batches, responses, metrics, version)
    objectives = []
    for response in map(policy.correction.apply, responses):
        objectives.append(BatchObjective(policy.loss.prepare(response), response))
    return objectives


def _without_pass(policy: Policy, batches: Sequence[MicroBatch]) -> list[BatchObjective]:
    """Return objectives whose old values are NaN until the update, on the last stage alone."""
    if not unwrap(policy.models[-1]).post_process:
        return []
    objectives = []
    for batch in batches:
        unknown = torch.full_like(batch.rollout_logprobs, torch.nan)
        response = ResponseTokens(
            unknown, unknown.clone(), batch.rollout_logprobs, batch.advantages, batch.cu_seqlens
        )
        objective = policy.loss.prepare(response)
        objectives.append(BatchObjective(objective, response, has_old_policy=False))
    return objectives


def _run_pass(
    policy: Policy, batches: Sequence[MicroBatch], metrics: MetricSums
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the (logprob, entropy) of each micro-batch, on the last pipeline stage alone."""

    def keep_outputs(
        logits: torch.Tensor, index: int
    ) -> tuple[None, tuple[torch.Tensor, torch.Tensor]]:
        logprob, entropy = policy.logprobs(logits, batches[index])
        return None, (logprob.detach(), entropy.detach())

    replay = policy.replay
    routing = "replay" if replay is None else replay.old_policy_routing
    outputs = run_schedule(
        policy.models,
        [batch.inputs for batch in batches],
        keep_outputs,
        forward_only=True,
        replay=replay,
        routing=routing,
        measure_routes=replay is not None and routing == "replay",
    )
    if replay is not None and routing == "replay":
        metrics.add_mean("mismatch/route_disagreement", *replay.disagreement())
    return outputs


def _add_metrics(
    policy: Policy,
    batches: Sequence[MicroBatch],
    responses: Sequence[ResponseTokens],
    metrics: MetricSums,
) -> None:
    for batch, response in zip(batches, responses, strict=False):
        metrics.add(advantage_sizes(batch, response.advantages))
    for response in responses:
        metrics.add({"policy/entropy": mean_of(response.old_entropies)})
        metrics.add(rollout_mismatch(response.old_logprobs, response.rollout_logprobs))
        metrics.add(policy.correction.metrics(response))


def _add_mismatch_by_age(
    batches: Sequence[MicroBatch],
    responses: Sequence[ResponseTokens],
    metrics: MetricSums,
    version: int,
) -> None:
    for batch, response in zip(batches, responses, strict=False):
        ages = np.where(batch.versions < 0, -1, version - batch.versions)
        metrics.add(mismatch_by_age(response.old_logprobs, response.rollout_logprobs, ages))
