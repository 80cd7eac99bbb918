"""CPU stand-ins for Transformer Engine's modules, put into the layer spec (no monkey-patching)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

_BUCKET_SPREAD = 1.25  # longest over shortest sequence in a padded bucket: bounds the padding's cost


class CpuRmsNorm(torch.nn.Module):
    """RMSNorm (arXiv 1910.07467) whose weight is marked for sequence parallelism, as Megatron's reductions need."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


class CpuCoreAttention(MegatronModule):
    """Causal attention over THD packing: [T, heads, dim] in, [T, heads * dim] out.

    Sequences of similar length are padded into one batch; a causal query never sees the padding behind it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise ValueError(
                f"parallel.cp={config.context_parallel_size}: context parallelism needs GPU attention; use 1"
            )
        self._scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        if packed_seq_params is None:
            raise ValueError("CPU attention takes packed sequences only: pass packed_seq_params")
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        outputs, positions = [], []
        for bucket in length_buckets(bounds):
            index, inside = _padded_index(bucket, query.device)
            q, k, v = (t[index].transpose(1, 2) for t in (query, key, value))  # [b, heads, s, dim]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale).transpose(1, 2)
            outputs.append(out[inside])
            positions.append(index[inside])
        order = torch.cat(positions).argsort()
        return torch.cat(outputs)[order].reshape(query.shape[0], -1)


def length_buckets(bounds: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Group the sequences [start, stop) of cumulative `bounds` so that lengths in a bucket are within 25 %."""
    spans = sorted(
        ((start, stop) for start, stop in itertools.pairwise(bounds) if stop > start),
        key=lambda span: span[1] - span[0],
    )
    buckets: list[list[tuple[int, int]]] = []
    for start, stop in spans:
        if not buckets or stop - start > _BUCKET_SPREAD * (buckets[-1][0][1] - buckets[-1][0][0]):
            buckets.append([])
        buckets[-1].append((start, stop))
    return buckets


def _padded_index(spans: Sequence[tuple[int, int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Row index [b, s] of each padded position (padding repeats the last row) and which positions are real."""
    starts = torch.tensor([start for start, _ in spans], device=device)[:, None]
    lengths = torch.tensor([stop - start for start, stop in spans], device=device)[:, None]
    offsets = torch.arange(int(lengths.max()), device=device)[None]
    return starts + torch.minimum(offsets, lengths - 1), offsets < lengths
