"""ESPO: one ratio and one clip range for each entropy group, with fused kernels."""

from __future__ import annotations

from typing import Any

import torch

from espo_kernels import espo_groups, espo_policy_loss
from espo_kernels.espo_groups import EspoGroups
from espo_kernels.espo_groups.settings import group_settings
from megatron_rl.config.algorithms import EspoSettings
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses.clipped_ratio import MAX_LOG_RATIO
from megatron_rl.losses.interface import (
    LossResult,
    Objective,
    ResponseTokens,
    TokenRatios,
    require_denominator,
    require_packed,
)
from megatron_rl.losses.sequences import sequence_lengths, spread


class Espo:
    """Objective of arXiv 2512.00499 v2, Eq. 7 to 11.

    `espo_kernels.espo_policy_loss` gives the formulas.

    vocab_size: |V|, size of the vocabulary without padding.

    Raises ValueError for invalid fractions.
    """

    def __init__(self, settings: EspoSettings, *, vocab_size: int) -> None:
        self._grouping: dict[str, Any] = {
            "vocab_size": vocab_size,
            "alpha": settings.alpha,
            "fractions": tuple(settings.fractions),
            "min_clip": settings.min_clip,
            "fixed_clip": settings.fixed_clip,
        }
        group_settings(**self._grouping)  # raises for invalid settings before the run starts

    def prepare(self, response: ResponseTokens) -> Objective:
        """See `PolicyLoss`.

        The entropy groups are computed once, so that all updates use the same ones.
        """
        # Do not check values: an exception on one rank would leave the others waiting, and a NaN
        # loss lets all ranks skip the step together.
        groups = espo_groups(
            response.old_entropies, response.cu_seqlens, check_values=False, **self._grouping
        )

        def objective(logprobs: torch.Tensor, denominators: Denominators) -> LossResult:
            require_packed(logprobs, response)
            result = espo_policy_loss(
                logprobs,
                response.old_logprobs,
                response.advantages,
                response.cu_seqlens,
                groups,
                num_sequences=require_denominator(
                    "sequences", denominators.sequences, logprobs.numel()
                ),
                check_values=False,
            )
            sums = {f"policy/{name}": pair for name, pair in result.metrics.means().items()}
            maxima = {
                f"policy/{name}": value
                for name, value in result.metrics.maxima().items()
                if logprobs.numel()
            }
            detached_logprobs = logprobs.detach()
            return LossResult(
                result.loss,
                sums,
                maxima,
                lambda: _token_ratios(detached_logprobs, response, groups),
            )

        return objective


def _token_ratios(
    logprobs: torch.Tensor, response: ResponseTokens, groups: EspoGroups
) -> TokenRatios:
    """Compute s_τ of every token and mark the clipped tokens, as the kernel does."""
    num_groups = groups.clip.shape[1]
    lengths = sequence_lengths(response.cu_seqlens)
    sequences = torch.arange(len(lengths), device=logprobs.device)
    index = spread(sequences, lengths, logprobs.numel()) * num_groups + groups.group_id.long()
    sums = logprobs.new_zeros(len(lengths) * num_groups, dtype=torch.float64)
    sums = sums.index_add(0, index, (logprobs - response.old_logprobs).double())
    means = sums / groups.count.flatten().clamp(min=1)
    ratios = means.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()[index]
    widths = groups.clip.flatten().double()[index]
    is_high = (response.advantages > 0) & (ratios > 1 + widths)
    is_low = (response.advantages < 0) & (ratios < 1 - widths)
    return TokenRatios(ratios.float(), is_high.to(torch.int8) - is_low.to(torch.int8))
