"""Tokens of packed sequences and the entropy groups within them.

Numbers that nobody checked become NaN here without a look from the host.
"""

from __future__ import annotations

import torch

MASKED = 255
"""The group id of tokens that belong to no group."""


def offsets_in_bounds(
    cu_seqlens: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(offsets, 0), or (zeros, NaN) for a cu_seqlens that does not rise from 0 to `num_tokens`."""
    offsets = cu_seqlens.long()
    valid = (offsets[0] == 0) & (offsets[-1] == num_tokens) & (offsets[1:] >= offsets[:-1]).all()
    return torch.where(valid, offsets, 0), torch.where(valid, 0.0, torch.nan)


def without_infinities(values: torch.Tensor) -> torch.Tensor:
    """The values, NaN for infinite ones: clamps and clips would make plausible numbers of them."""
    return values + (values - values)


def segment_sums(values: torch.Tensor, segments: torch.Tensor, num_segments: int) -> torch.Tensor:
    """[num_segments] float64 sums of `values` by segment, in token order (CPU: deterministic)."""
    # Without elements bincount ignores the dtype of its weights.
    return torch.bincount(segments, weights=values.double(), minlength=num_segments).double()
