"""What every backend of the loss receives, already checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from espo_kernels.segments import MASKED

RatioDenominator = Literal["current", "old"]

MAX_LOG_RATIO = 10.0
"""|log s| is clamped here before exp: a value far outside any clip range, kept finite. The gradient still flows."""


@dataclass(frozen=True)
class LossInputs:
    """Constants of the loss: old_logprobs[T], advantages[T], cu_seqlens[B + 1], group_id[T], clip[B, K], mask[T]."""

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
        """Whether this rank counts whole groups in the metrics: once per context-parallel group."""
        return self.cp_group is None or dist.get_rank(self.cp_group) == 0

    def members(self) -> torch.Tensor:
        """[T] group ids with the loss mask applied."""
        if self.loss_mask is None:
            return self.group_id
        return self.group_id.masked_fill(self.loss_mask == 0, MASKED)

    def all_reduced(self, sums: torch.Tensor) -> torch.Tensor:
        """`sums` added over the ranks that hold parts of the same sequences."""
        if self.cp_group is not None:
            dist.all_reduce(sums, group=self.cp_group)
        return sums

    def denominator(self, has_advantage: torch.Tensor) -> float | torch.Tensor:
        """B: the plan's constant, else the sequences of this call with an advantage ([B] counts), at least 1."""
        if self.num_sequences is not None:
            return self.num_sequences
        return (has_advantage > 0).sum().clamp_min(1)
