"""Diagnostics of the loss, as sums that reduce exactly over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from espo_kernels.segments import MASKED, segment_sums


@dataclass(frozen=True)
class EspoMetrics:
    """One entry per entropy group, [K] float64 on the loss's device, from the highest entropies to
    the lowest.

    tokens: unmasked tokens. clipped_low, clipped_high: tokens whose gradient the clip removes (A <
    0 and s < 1 − ε; A > 0 and s > 1 + ε). ratio_sum, ratio_square_sum, ratio_min, ratio_max: of s_t
    over tokens (±inf where there are none). groups: non-empty (sequence, group) pairs. epsilon_sum:
    of their ε. All but the two extremes add up over micro-batches, data-parallel and
    context-parallel ranks.
    """

    tokens: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor
    ratio_sum: torch.Tensor
    ratio_square_sum: torch.Tensor
    groups: torch.Tensor
    epsilon_sum: torch.Tensor
    ratio_min: torch.Tensor
    ratio_max: torch.Tensor

    def means(self) -> dict[str, torch.Tensor]:
        """[2] tensors (weighted sum, weight) by name: add them up, divide at the end.

        `clip_fraction_low`, `clip_fraction_high`, `ratio_mean`, `ratio_square_mean` per token and
        `epsilon_mean` per group; the same with `/group<k>` for each group, 0 being the highest
        entropies. Kish's effective sample size of the ratios, as a share of the tokens, is
        ratio_mean² / ratio_square_mean. It is no quotient of sums, so it follows from these two
        once they are summed.
        """
        pairs = {
            "clip_fraction_low": (self.clipped_low, self.tokens),
            "clip_fraction_high": (self.clipped_high, self.tokens),
            "ratio_mean": (self.ratio_sum, self.tokens),
            "ratio_square_mean": (self.ratio_square_sum, self.tokens),
            "epsilon_mean": (self.epsilon_sum, self.groups),
        }
        sums = {}
        for name, (total, weight) in pairs.items():
            by_group = torch.stack((total, weight), dim=1)
            sums[name] = by_group.sum(0)
            sums |= {f"{name}/group{k}": row for k, row in enumerate(by_group)}
        return sums

    def maxima(self) -> dict[str, torch.Tensor]:
        """Scalars whose maximum over parts is the value of the whole: `ratio_max` and
        `inverse_ratio_max`, 1 / the smallest.

        Without tokens they are −inf and 0.
        """
        return {"ratio_max": self.ratio_max.max(), "inverse_ratio_max": 1 / self.ratio_min.min()}


def metrics_from_tokens(
    s_t: torch.Tensor,
    eps_t: torch.Tensor,
    advantages: torch.Tensor,
    group_id: torch.Tensor,
    clip: torch.Tensor,
    nonempty: torch.Tensor,
    counts_groups: bool,
) -> EspoMetrics:
    """Metrics from each token's ratio and clip width ([T]) and each group's ([B, K]).

    counts_groups: False on ranks that hold another part of sequences whose groups are counted
    elsewhere.
    """
    num_groups = clip.shape[1]
    indices = (group_id != MASKED).nonzero().flatten()
    k = group_id[indices].long()
    s = s_t[indices].double()
    eps = eps_t[indices].double()
    A = advantages[indices].double()

    def by_group(values: torch.Tensor) -> torch.Tensor:
        return segment_sums(values, k, num_groups)

    share = float(counts_groups)
    return EspoMetrics(
        tokens=by_group(torch.ones_like(s)),
        clipped_low=by_group((A < 0) & (s < 1 - eps)),
        clipped_high=by_group((A > 0) & (s > 1 + eps)),
        ratio_sum=by_group(s),
        ratio_square_sum=by_group(s * s),
        groups=nonempty.double().sum(0) * share,
        epsilon_sum=torch.where(nonempty, clip.double(), 0.0).sum(0) * share,
        ratio_min=-_maxima(-s, k, num_groups),
        ratio_max=_maxima(s, k, num_groups),
    )


def _maxima(values: torch.Tensor, k: torch.Tensor, num_groups: int) -> torch.Tensor:
    """[K] maxima of the values by group, −inf without values."""
    start = values.new_full((num_groups,), -torch.inf)
    return start.scatter_reduce(0, k, values, reduce="amax")
