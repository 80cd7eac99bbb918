"""The input of one forward pass: sequences packed one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams


@dataclass(frozen=True)
class PackedBatch:
    """One packed micro-batch of T rows and B sequences.

    R is the number of rows that the routers of this rank see. It is T without sequence or context
    parallelism.

    input_ids, position_ids: int64 [1, T].
    cu_seqlens: int32 [B + 1], the bounds of the sequences.
    max_seqlen: the length of the longest sequence.
    routes: recorded experts [R, MoE layers of this rank, topk]; None without replay.
    real_rows: bool [R], False for padding; None if no row is padding.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    routes: torch.Tensor | None = None
    real_rows: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """The number of rows T, padding included."""
        return self.input_ids.shape[1]

    def packed_seq_params(self) -> PackedSeqParams:
        """Return the bounds as Megatron's attention takes them."""
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
        )
