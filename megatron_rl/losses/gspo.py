"""GSPO-token: one ratio per sequence, averaged over sequences."""

from __future__ import annotations

import torch

from megatron_rl.config.algorithms import GspoSettings
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
from megatron_rl.losses.sequences import sequence_lengths, sequence_means, spread


class Gspo:
    """L = -1/B Σ_i 1/|y_i| Σ_t min(s_it A_it, clip(s_it, 1 - clip_low, 1 + clip_high) A_it)

        s_i  = exp( 1/|y_i| Σ_t (log π_θ(y_it) - log π_old(y_it)) )
        s_it = sg[s_i] · π_θ(y_it) / sg[π_θ(y_it)]

    GSPO-token (arXiv 2507.18071), Eq. 13 and 14; B = denominators.sequences. With one advantage per
    sequence, its value and gradient equal GSPO's, Eq. 5 to 7.
    """

    def __init__(self, settings: GspoSettings) -> None:
        self._low = settings.clip_low
        self._high = settings.clip_high

    def prepare(self, response: ResponseTokens) -> Objective:
        """See `PolicyLoss`."""

        def objective(logprobs: torch.Tensor, denominators: Denominators) -> LossResult:
            require_packed(logprobs, response)
            count = require_denominator("sequences", denominators.sequences, logprobs.numel())
            lengths = sequence_lengths(response.cu_seqlens)
            token_log_ratio = (logprobs - response.old_logprobs).detach()
            log_ratio = spread(sequence_means(token_log_ratio, lengths), lengths, logprobs.numel())
            ratio = ratio_through_tokens(log_ratio, logprobs)
            surrogate = clipped_surrogate(
                ratio, response.advantages, low=self._low, high=self._high
            )
            weight = 1.0 / spread(lengths.to(logprobs.dtype), lengths, logprobs.numel())
            sums, maxima = ratio_metrics(ratio, surrogate)
            loss = -(surrogate.objective * weight).sum() / count
            return LossResult(loss, sums, maxima, token_ratios(ratio, surrogate))

        return objective
