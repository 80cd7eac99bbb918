"""Rotary embedding of a packed batch: one rotation for all of its sequences."""

from __future__ import annotations

from typing import Any, Self

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams


class PackedRotaryEmbedding(RotaryEmbedding):
    """Megatron's angles by row of a packed batch, instead of by position in a sequence.

    With angles by position, Megatron's unfused rotation rotates one sequence after the other. With
    an angle for each row, it rotates all of them at once. Fused rotations need angles by position.
    """

    def get_rotary_seq_len(self, *arguments: Any, **options: Any) -> int:
        """Return the length of the longest sequence.

        For a packed batch, the number carries the bounds of all sequences.
        """
        length: int = super().get_rotary_seq_len(*arguments, **options)
        for value in (*arguments, *options.values()):
            if isinstance(value, PackedSeqParams):
                return _LengthWithBounds.with_bounds(length, value.cu_seqlens_q)
        return length

    def forward(self, max_seq_len: int, *arguments: Any, **options: Any) -> torch.Tensor:
        """Return the angles of all rows [T, 1, 1, dimension].

        max_seq_len: from `get_rotary_seq_len`.
        """
        angles: torch.Tensor = super().forward(int(max_seq_len), *arguments, **options)
        if isinstance(max_seq_len, _LengthWithBounds):
            return angles[max_seq_len.positions()]
        return angles


class _LengthWithBounds(int):
    """The length of the longest sequence. bounds: of all sequences, int32 [B + 1]."""

    bounds: torch.Tensor

    @classmethod
    def with_bounds(cls, length: int, bounds: torch.Tensor) -> Self:
        """Make a length that carries these bounds."""
        longest = cls(length)
        longest.bounds = bounds
        return longest

    def positions(self) -> torch.Tensor:
        """Return the position of each row in its sequence, int64 [T]."""
        bounds = self.bounds.long()
        starts = torch.repeat_interleave(bounds[:-1], bounds.diff())
        return torch.arange(len(starts), device=bounds.device) - starts
