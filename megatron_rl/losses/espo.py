"""ESPO: one ratio and one clip range for each entropy group, with fused kernels."""

from __future__ import annotations

from typing import Any

import torch

from espo_kernels import espo_groups, espo_policy_loss
from espo_kernels.espo_groups.settings import group_settings
from megatron_rl.config.algorithms import EspoSettings
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses.interface import (
    LossResult,
    Objective,
    ResponseTokens,
    require_denominator,
    require_packed,
)


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
            return LossResult(result.loss, sums, maxima)

        return objective
