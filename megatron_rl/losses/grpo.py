"""GRPO with clip-higher: token ratios, averaged over all tokens of the optimizer step."""

from __future__ import annotations

import torch

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses.clipped_ratio import (
    clipped_surrogate,
    ratio_metrics,
    ratio_through_tokens,
    token_ratios,
)
from megatron_rl.losses.interface import (
    LossResult,
    Objective,
    ResponseTokens,
    require_denominator,
    require_packed,
)


class Grpo:
    """L = -1/N Σ_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

        r_t = π_θ(y_t) / π_old(y_t)

    GRPO (arXiv 2402.03300) with DAPO's token-level mean and decoupled clipping (arXiv 2503.14476),
    Eq. 8 to 12; N = denominators.tokens.
    """

    def __init__(self, settings: GrpoSettings) -> None:
        self._low = settings.clip_low
        self._high = settings.clip_high

    def prepare(self, response: ResponseTokens) -> Objective:
        """See `PolicyLoss`."""

        def objective(logprobs: torch.Tensor, denominators: Denominators) -> LossResult:
            require_packed(logprobs, response)
            count = require_denominator("tokens", denominators.tokens, logprobs.numel())
            ratio = ratio_through_tokens(logprobs - response.old_logprobs, logprobs)
            surrogate = clipped_surrogate(
                ratio, response.advantages, low=self._low, high=self._high
            )
            sums, maxima = ratio_metrics(ratio, surrogate)
            loss = -surrogate.objective.sum() / count
            return LossResult(loss, sums, maxima, token_ratios(ratio, surrogate))

        return objective
