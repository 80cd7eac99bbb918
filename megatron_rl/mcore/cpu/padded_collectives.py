"""Collectives for parts of unequal size over gloo, which moves equal parts only.

Expert-parallel replicas route different numbers of tokens. Each part is padded with zero rows to
the largest size, moved, and cut to its own size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

FirstAxisCollective = Callable[..., torch.Tensor]


def padded_gather(gather: FirstAxisCollective) -> FirstAxisCollective:
    """Wrap Megatron's gather along the first axis, so that parts may differ in size.

    The result takes (part [rows, ...], group, sizes), where `sizes` holds the rows of every rank,
    and returns all parts in rank order, [sum(sizes), ...]. Collective.
    """

    def gather_unequal(
        part: torch.Tensor, group: dist.ProcessGroup, sizes: Sequence[int] | None = None, *rest: Any
    ) -> torch.Tensor:
        if sizes is None or len(set(sizes)) == 1:
            return gather(part, group, sizes, *rest)
        largest = max(sizes)
        parts = gather(_pad_rows(part, largest), group).split(largest)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return gather_unequal


def padded_reduce_scatter(reduce_scatter: FirstAxisCollective) -> FirstAxisCollective:
    """Wrap Megatron's reduce-scatter along the first axis, so that parts may differ in size.

    The result takes (whole [sum(sizes), ...], group, sizes) and returns this rank's part of the
    sum, [sizes[rank], ...]. Collective.
    """

    def reduce_scatter_unequal(
        whole: torch.Tensor,
        group: dist.ProcessGroup,
        sizes: Sequence[int] | None = None,
        *rest: Any,
    ) -> torch.Tensor:
        if sizes is None or len(set(sizes)) == 1:
            return reduce_scatter(whole, group, sizes, *rest)
        parts = [_pad_rows(part, max(sizes)) for part in whole.split(list(sizes))]
        return reduce_scatter(torch.cat(parts), group)[: sizes[group.rank()]]

    return reduce_scatter_unequal


def _pad_rows(part: torch.Tensor, rows: int) -> torch.Tensor:
    """Append zero rows up to `rows`."""
    result = part.new_zeros((rows, *part.shape[1:]))
    result[: len(part)] = part
    return result
