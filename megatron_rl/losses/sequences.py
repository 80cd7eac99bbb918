"""Sums over the sequences of a packed micro-batch."""

from __future__ import annotations

import torch


def sequence_lengths(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """int64 [B] lengths from int [B + 1] offsets."""
    return cu_seqlens.diff().long()


def spread(per_sequence: torch.Tensor, lengths: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[B] -> [T]: every token gets its sequence's value. num_tokens: T, known on the host."""
    return torch.repeat_interleave(per_sequence, lengths, output_size=num_tokens)


def sequence_means(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[T] -> [B]: the mean over each sequence; 0 for an empty one. NaN stays within its sequence."""
    index = spread(torch.arange(len(lengths), device=values.device), lengths, values.numel())
    totals = torch.zeros(len(lengths), dtype=values.dtype, device=values.device).index_add(
        0, index, values
    )
    return totals / lengths.clamp(min=1)
