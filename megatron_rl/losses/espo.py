"""ESPO: one ratio and one clip width per entropy group, from the fused kernels."""

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
    """The objective of arXiv 2512.00499 v2, Eq. 7 to 11; the formulas are those of
    `espo_kernels.espo_policy_loss`.

    vocab_size: |V|, the true vocabulary without padding. Raises ValueError for fractions that make
    no groups.
    """

    def __init__(self, settings: EspoSettings, *, vocab_size: int) -> None:
        self._grouping: dict[str, Any] = {
            "vocab_size": vocab_size,
            "alpha": settings.alpha,
            "fractions": tuple(settings.fractions),
            "min_clip": settings.min_clip,
            "fixed_clip": settings.fixed_clip,
        }
        group_settings(**self._grouping)  # refuses before anything runs

    def prepare(self, response: ResponseTokens) -> Objective:
        """See `PolicyLoss`.

        The entropy groups are fixed here: grouping anew at each update would move them.
        """
        # An exception on one rank would leave the others waiting; a loss of NaN lets all agree to
        # skip the step.
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
