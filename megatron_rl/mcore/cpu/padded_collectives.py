"""Gloo moves equal parts only, and expert-parallel replicas route different numbers of tokens: pad,
move, cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

AlongFirstAxis = Callable[..., torch.Tensor]


def padded_gather(gather: AlongFirstAxis) -> AlongFirstAxis:
    """Megatron's gather along the first axis, for parts of different sizes too."""

    def gathered(
        part: torch.Tensor, group: dist.ProcessGroup, sizes: Sequence[int] | None = None, *rest: Any
    ) -> torch.Tensor:
        if sizes is None or len(set(sizes)) == 1:
            return gather(part, group, sizes, *rest)
        largest = max(sizes)
        parts = gather(_padded(part, largest), group).split(largest)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return gathered


def padded_reduce_scatter(reduce_scatter: AlongFirstAxis) -> AlongFirstAxis:
    """Megatron's reduce-scatter along the first axis, for parts of different sizes too."""

    def scattered(
        whole: torch.Tensor,
        group: dist.ProcessGroup,
        sizes: Sequence[int] | None = None,
        *rest: Any,
    ) -> torch.Tensor:
        if sizes is None or len(set(sizes)) == 1:
            return reduce_scatter(whole, group, sizes, *rest)
        parts = [_padded(part, max(sizes)) for part in whole.split(list(sizes))]
        return reduce_scatter(torch.cat(parts), group)[: sizes[group.rank()]]

    return scattered


def _padded(part: torch.Tensor, size: int) -> torch.Tensor:
    padded = part.new_zeros((size, *part.shape[1:]))
    padded[: len(part)] = part
    return padded
