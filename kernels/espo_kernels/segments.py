"""Tokens of packed sequences and the entropy groups within them.

Invariant: sequence i owns tokens cu_seqlens[i] to cu_seqlens[i + 1]; a masked token belongs to no group.
"""

from __future__ import annotations

import torch

MASKED = 255
"""The group id of tokens that belong to no group."""


def sequence_ids(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[T] int64: the sequence of each token."""
    lengths = cu_seqlens.diff().long()
    ids = torch.arange(lengths.numel(), device=cu_seqlens.device)
    return torch.repeat_interleave(ids, lengths, output_size=num_tokens)


def segment_sums(values: torch.Tensor, segments: torch.Tensor, num_segments: int) -> torch.Tensor:
    """[num_segments] float64 sums of `values` by segment, in token order (CPU: deterministic)."""
    # Without elements bincount ignores the dtype of its weights.
    return torch.bincount(segments, weights=values.double(), minlength=num_segments).double()
