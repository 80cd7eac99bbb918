"""ESPO: one ratio and one clip width per entropy group, from the fused kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from espo_kernels import EspoGroups, EspoMetrics, espo_groups, espo_policy_loss
from espo_kernels.backends import resolve_backend
from megatron_rl.contracts.plan import Denominators
from megatron_rl.losses.interface import LossResult, ResponseTokens, require_denominator, require_packed


class Espo:
    """The objective of arXiv 2512.00499 v2, Eq. 7 to 11; the formulas are those of `espo_kernels.espo_policy_loss`.

    vocab_size: |V|, the true vocabulary without padding. alpha: clip width per normalised entropy. fractions: shares of
    the groups before the last, from the highest entropies; () is no grouping. min_clip: smallest clip width; the
    paper's is 0, which at a large vocabulary lies below numerical noise. fixed_clip: one width for all groups instead.
    ratio_denominator: `old` is the paper's Eq. 9 as printed.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        alpha: float = 0.02,
        fractions: Sequence[float] = (0.2,),
        min_clip: float = 3e-4,
        fixed_clip: float | None = None,
        ratio_denominator: Literal["current", "old"] = "current",
    ) -> None:
        if ratio_denominator not in ("current", "old"):
            raise ValueError(f"algo.ratio_denominator={ratio_denominator}: must be current or old")
        self._vocab_size = vocab_size
        self._alpha = alpha
        self._fractions = tuple(fractions)
        self._min_clip = min_clip
        self._fixed_clip = fixed_clip
        self._ratio_denominator: Literal["current", "old"] = ratio_denominator
        # Refuses bad settings before anything runs.
        self._group(torch.zeros(0), torch.zeros(1, dtype=torch.int32), backend="reference")

    def groups(self, response: ResponseTokens) -> EspoGroups:
        """Entropy groups of every sequence. Entropies that are not finite make the loss NaN, never raise."""
        entropies = response.old_entropies.detach()
        finite = torch.isfinite(entropies)
        groups = self._group(torch.where(finite, entropies, 0.0), response.cu_seqlens)
        poison = torch.where(finite.all(), 0.0, torch.nan)
        return EspoGroups(groups.group_id, groups.clip + poison, groups.count)

    def __call__(
        self, logprobs: torch.Tensor, response: ResponseTokens, groups: object | None, denominators: Denominators
    ) -> LossResult:
        require_packed(logprobs, response)
        count = require_denominator("sequences", denominators.sequences, logprobs.numel())
        if not isinstance(groups, EspoGroups):
            raise TypeError("ESPO needs the groups of the same response: call groups(response) first")
        if _refuses_values(logprobs) and not _finite(logprobs, response, groups):
            # A loss of NaN instead lets all ranks agree to skip the step.
            return LossResult(logprobs.sum() * torch.nan + torch.nan, {})
        result = espo_policy_loss(
            logprobs,
            response.old_logprobs,
            response.advantages,
            response.cu_seqlens,
            groups,
            num_sequences=count,
            ratio_denominator=self._ratio_denominator,
        )
        return LossResult(result.loss, _sums(result.metrics), _maxima(result.metrics) if logprobs.numel() else {})

    def _group(
        self, entropies: torch.Tensor, cu_seqlens: torch.Tensor, backend: Literal["auto", "reference"] = "auto"
    ) -> EspoGroups:
        return espo_groups(
            entropies,
            cu_seqlens,
            vocab_size=self._vocab_size,
            alpha=self._alpha,
            fractions=self._fractions,
            min_clip=self._min_clip,
            fixed_clip=self._fixed_clip,
            backend=backend,
        )


def _refuses_values(logprobs: torch.Tensor) -> bool:
    """Whether the kernels raise for NaN and infinities even without their debug switch: on CPU and in the reference."""
    return logprobs.device.type == "cpu" or resolve_backend("auto", logprobs, cpu_needs_numba=True) == "reference"


def _finite(logprobs: torch.Tensor, response: ResponseTokens, groups: EspoGroups) -> bool:
    values = (logprobs, response.old_logprobs, response.advantages, groups.clip)
    return all(bool(torch.isfinite(tensor).all()) for tensor in values)


def _sums(metrics: EspoMetrics) -> dict[str, torch.Tensor]:
    """Under each name the whole batch, under name/groupN one entropy group, 0 being the highest entropies.

    Kish's effective sample size of the ratios, as a share of the tokens, is policy/ratio_mean² /
    policy/ratio_square_mean. It is no quotient of sums, so it follows from these two once they are summed.
    """
    return {f"policy/{name}": pair for name, pair in metrics.means().items()}


def _maxima(metrics: EspoMetrics) -> dict[str, torch.Tensor]:
    return {"policy/ratio_max": metrics.ratio_max.max(), "policy/inverse_ratio_max": 1 / metrics.ratio_min.min()}
