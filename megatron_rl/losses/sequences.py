"""Lengths and means of the sequences of a packed micro-batch."""

from __future__ import annotations

import torch


def sequence_lengths(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return lengths, int64 [B], from offsets, int [B + 1]."""
    return cu_seqlens.diff().long()


def spread(per_sequence: torch.Tensor, lengths: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Repeat each sequence's value for its tokens: [B] -> [T].

    num_tokens: T, which avoids waiting for the device.
    """
    return torch.repeat_interleave(per_sequence, lengths, output_size=num_tokens)


def sequence_means(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the mean of each sequence: [T] -> [B]. It is 0 for an empty sequence.

    NaN affects its own sequence only.
    """
    index = spread(torch.arange(len(lengths), device=values.device), lengths, values.numel())
    zeros = torch.zeros(len(lengths), dtype=values.dtype, device=values.device)
    return zeros.index_add(0, index, values) / lengths.clamp(min=1)
