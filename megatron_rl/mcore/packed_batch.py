"""A packed micro-batch as the model takes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams


@dataclass(frozen=True)
class PackedBatch:
    """input_ids, position_ids int64 [1, T]; cu_seqlens int32 [B + 1]; routes [R, local MoE layers,
    topk] or None.

    R is the number of rows this rank's routers see: T without sequence or context parallelism.
    real_rows bool [R] tells them from padding, None when all are real.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    routes: torch.Tensor | None = None
    real_rows: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]

    def packed_seq_params(self) -> PackedSeqParams:
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
        )
