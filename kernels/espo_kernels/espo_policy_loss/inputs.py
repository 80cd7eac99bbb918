"""Inputs of every backend of the loss, already checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist

from espo_kernels.segments import MASKED, offsets_in_bounds, without_infinities

RatioDenominator = Literal["current", "old"]

MAX_LOG_RATIO = 10.0
"""|log s| is clamped here before exp: a value far outside any clip range, kept finite.

The gradient still flows.
"""


@dataclass(frozen=True)
class LossInputs:
    """Constants of the loss: old_logprobs[T], advantages[T], cu_seqlens[B + 1], group_id[T],
    clip[B, K], mask[T].
    """

    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    cu_seqlens: torch.Tensor
    group_id: torch.Tensor
    clip: torch.Tensor
    loss_mask: torch.Tensor | None
    ratio_denominator: RatioDenominator
    num_sequences: float | torch.Tensor | None
    cp_group: dist.ProcessGroup | None

    @property
    def num_groups(self) -> int:
        return self.clip.shape[1]

    @property
    def counts_groups(self) -> bool:
        """True on the rank of a context-parallel group that counts whole groups in the metrics."""
        return self.cp_group is None or dist.get_rank(self.cp_group) == 0

    def members(self) -> torch.Tensor:
        """[T] group ids with the loss mask applied."""
        if self.loss_mask is None:
            return self.group_id
        return self.group_id.masked_fill(self.loss_mask == 0, MASKED)

    def in_bounds(self) -> tuple[LossInputs, torch.Tensor]:
        """(these inputs without a mask, every index in bounds; 0, or NaN if one was not)."""
        offsets, poison = offsets_in_bounds(self.cu_seqlens, self.group_id.numel())
        members = self.members()
        strays = (members != MASKED) & (members >= self.num_groups)
        inside = replace(
            self, cu_seqlens=offsets, group_id=members.masked_fill(strays, MASKED), loss_mask=None
        )
        return inside, torch.where(strays.any(), torch.nan, poison)

    def all_reduced(self, sums: torch.Tensor) -> torch.Tensor:
        """`sums` added over the ranks that hold parts of the same sequences."""
        if self.cp_group is not None:
            dist.all_reduce(sums, group=self.cp_group)
        return sums

    def denominator(self, has_advantage: torch.Tensor) -> float | torch.Tensor:
        """B: the plan's constant, else the sequences of this call with an advantage ([B] counts),
        at least 1.

        NaN for a tensor that is not positive and finite.
        """
        if isinstance(self.num_sequences, torch.Tensor):
            B = without_infinities(self.num_sequences.double())
            return torch.where(B > 0, B, torch.nan)
        if self.num_sequences is not None:
            return self.num_sequences
        return (has_advantage > 0).sum().clamp_min(1)
