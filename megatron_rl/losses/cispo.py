"""CISPO: clipped importance weights of the log-likelihood, averaged over all tokens of the step."""

from __future__ import annotations

import torch

from megatron_rl.config.algorithms import CispoSettings
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses.clipped_ratio import Surrogate, limited_ratio, ratio_metrics, token_ratios
from megatron_rl.losses.interface import (
    LossResult,
    Objective,
    ResponseTokens,
    require_denominator,
    require_packed,
)


class Cispo:
    """L = -1/N Σ_t sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A_t log π_θ(y_t)

        r_t = π_θ(y_t) / π_old(y_t)

    MiniMax-M1 (arXiv 2506.13585), Eq. 4 and 5; N = denominators.tokens. The weight is a constant,
    so every token keeps its gradient, weight · A_t.
    """

    def __init__(self, settings: CispoSettings) -> None:
        self._low = 1 - settings.clip_low
        self._high = 1 + settings.clip_high

    def prepare(self, response: ResponseTokens) -> Objective:
        """See `PolicyLoss`.

        policy/clip_fraction_low and policy/clip_fraction_high are the shares of tokens whose weight
        is a bound.
        """

        def objective(logprobs: torch.Tensor, denominators: Denominators) -> LossResult:
            require_packed(logprobs, response)
            count = require_denominator("tokens", denominators.tokens, logprobs.numel())
            ratio = limited_ratio(logprobs - response.old_logprobs)
            weight = ratio.clamp(self._low, self._high)
            surrogate = Surrogate(
                objective=weight * response.advantages * logprobs,
                clipped_low=ratio < self._low,
                clipped_high=ratio > self._high,
            )
            sums, maxima = ratio_metrics(ratio, surrogate)
            loss = -surrogate.objective.sum() / count
            return LossResult(loss, sums, maxima, token_ratios(ratio, surrogate))

        return objective
