"""Vocabulary columns of each rank, and the softmax of the ranks' partial sums."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

import torch
import torch.distributed as dist

LOWEST = -1e30
"""Stands for −inf in exponents that are multiplied.

exp gives 0 and 0 · LOWEST is 0, where 0 · −inf would be NaN.
"""


@dataclass(frozen=True)
class VocabularyShard:
    """Columns [first, first + valid) of the vocabulary are this rank's first `valid` logits; the
    rest is padding.
    """

    first: int
    valid: int
    inverse_temperature: float
    group: dist.ProcessGroup | None


class TokenStatistics(NamedTuple):
    """[T] float32 each.

    log_sum: log Σ exp((x − anchor) / τ), where the anchor is a logit at or near the maximum.
    """

    logprob: torch.Tensor
    entropy: torch.Tensor
    anchor: torch.Tensor
    log_sum: torch.Tensor


def vocabulary_shard(
    columns: int, vocab_size: int | None, temperature: float, group: dist.ProcessGroup | None
) -> VocabularyShard:
    """This rank's shard. Ranks hold equally many columns, in rank order.

    Raises ValueError for a vocab_size outside the columns.
    """
    rank = 0 if group is None else dist.get_rank(group)
    ranks = 1 if group is None else dist.get_world_size(group)
    num_columns = columns * ranks
    size = num_columns if vocab_size is None else vocab_size
    if not isinstance(size, Integral) or not 0 < size <= num_columns:
        raise ValueError(
            f"vocab_size={vocab_size}: must be an integer from 1 to {num_columns}, "
            f"the columns of logits on {ranks} ranks"
        )
    first = rank * columns
    return VocabularyShard(first, min(max(size - first, 0), columns), 1.0 / temperature, group)


def gather_shards(partial: torch.Tensor, shard: VocabularyShard) -> list[torch.Tensor]:
    """Every rank's partial sums, in rank order: one all-gather, or none without a group."""
    if shard.group is None:
        return [partial]
    partials = [torch.empty_like(partial) for _ in range(dist.get_world_size(shard.group))]
    dist.all_gather(partials, partial, group=shard.group)
    return partials


def merge_shards(
    partials: list[torch.Tensor], targets: torch.Tensor, columns: int, inverse_temperature: float
) -> TokenStatistics:
    """The softmax of all shards.

    Args:
        partials: by rank, [4, T] float32: anchor, Σ exp(d), Σ d · exp(d) with d = (x − anchor) / τ,
            and the target's logit (NaN where another rank holds it).
        columns: logits per rank.
    """
    shards = torch.stack(partials)
    anchor = shards[:, 0].amax(0)
    shift = ((shards[:, 0] - anchor) * inverse_temperature).clamp_min(LOWEST)
    scale = shift.exp()
    total = (scale * shards[:, 1]).sum(0)
    weighted_total = (scale * (shards[:, 2] + shift * shards[:, 1])).sum(0)
    owner = torch.div(targets.long(), columns, rounding_mode="floor").clamp(0, len(partials) - 1)
    target_logit = shards[:, 3].gather(0, owner.unsqueeze(0)).squeeze(0)
    log_sum = total.log()
    return TokenStatistics(
        logprob=(target_logit - anchor) * inverse_temperature - log_sum,
        entropy=log_sum - weighted_total / total,
        anchor=anchor,
        log_sum=log_sum,
    )
