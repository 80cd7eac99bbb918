"""Tokens of packed sequences and the entropy groups within them."""

from __future__ import annotations

import torch

MASKED = 255
"""The group id of tokens that belong to no group."""


def segment_sums(values: torch.Tensor, segments: torch.Tensor, num_segments: int) -> torch.Tensor:
    """[num_segments] float64 sums of `values` by segment, in token order (CPU: deterministic)."""
    # Without elements bincount ignores the dtype of its weights.
    return torch.bincount(segments, weights=values.double(), minlength=num_segments).double()
