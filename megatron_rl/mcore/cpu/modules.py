"""What the local layer spec uses in place of Transformer Engine's modules, on CPUs and on GPUs (no
monkey-patching).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.mcore.varlen_attention import VarlenAttention
from megatron_rl.planning.rank_view import zigzag_rows

_BUCKET_SPREAD = (
    1.25  # longest over shortest sequence in a padded bucket: bounds the padding's cost
)
_POSITIONS = 16  # of whole vectors, with which a row's sums do not depend on how long its bucket is


class CpuRmsNorm(torch.nn.Module):
    """RMSNorm (arXiv 1910.07467) whose weight is marked for sequence parallelism, as Megatron's
    reductions need.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


class CpuCoreAttention(MegatronModule):
    """Causal attention over THD packing: [T, heads, dim] in, [T, heads * dim] out.

    In half precision on CUDA it is torch's variable-length attention where the installed torch has
    it. Elsewhere sequences of similar length are padded into one batch; a causal query never sees
    the padding behind it. Ranks that share sequences (context parallelism, `zigzag_rows`) do that
    too: they gather keys and values, and attend with the queries they hold.
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
        self._scale = softmax_scale
        self._varlen = VarlenAttention()
        self._cp_group = (
            None
            if config.context_parallel_size == 1
            else parallel_state.get_context_parallel_group()
        )

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
            raise ValueError("this attention takes packed sequences only: pass packed_seq_params")
        if self._cp_group is None and self._varlen.fits(query, key, value):
            lengths = {
                "cu_seqlens": packed_seq_params.cu_seqlens_q,
                "max_seqlen": packed_seq_params.max_seqlen_q,
            }
            return self._varlen(query, key, value, **lengths, scale=self._scale).reshape(
                query.shape[0], -1
            )
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        held = None
        if self._cp_group is not None:
            held, (key, value) = _whole_sequences(bounds, (key, value), self._cp_group)
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        outputs, positions = [], []
        for bucket in length_buckets(bounds):
            out, rows = self._attend(bucket, query, key, value, held)
            outputs.append(out)
            positions.append(rows)
        order = torch.cat(positions).argsort()
        return torch.cat(outputs)[order].reshape(query.shape[0], -1)

    def _attend(
        self,
        bucket: Sequence[tuple[int, int]],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        held: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one bucket's queries, [rows, heads, dim], and which rows of `query` these
        are.

        held: the packed rows that the queries are, None where they are all rows.
        """
        keys, real = _padded_index(bucket, query.device)
        queries, inside, mask = keys, real, None
        if held is not None:
            size = len(key) // len(query)
            queries, inside = _padded_index(
                [(start // size, stop // size) for start, stop in bucket], query.device
            )
            mask = ((keys[:, None, :] <= held[queries][:, :, None]) & real[:, None, :])[:, None]
        q, k, v = (
            t.transpose(1, 2) for t in (query[queries], key[keys], value[keys])
        )  # [b, heads, s, dim]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scale
        )
        return out.transpose(1, 2)[inside], queries[inside]


def _whole_sequences(
    bounds: Sequence[int], parts: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The packed rows held here, and the `parts` of all ranks, [T, ...], in packed order; gradients
    go back to them.
    """
    size, offsets = group.size(), np.array(bounds)
    device = parts[0].device
    rows = [torch.from_numpy(zigzag_rows(offsets, rank, size)).to(device) for rank in range(size)]
    order = torch.cat(rows).argsort()
    return rows[group.rank()], [
        gather_from_sequence_parallel_region(part, group=group)[order] for part in parts
    ]


def length_buckets(bounds: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Group the sequences [start, stop) of cumulative `bounds` so that lengths in a bucket are
    within 25 %.
    """
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


def _padded_index(
    spans: Sequence[tuple[int, int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row index [b, s] of each padded position (padding repeats the last row) and which positions
    are real.

    s is a multiple of `_POSITIONS`.
    """
    starts = torch.tensor([start for start, _ in spans], device=device)[:, None]
    lengths = torch.tensor([stop - start for start, stop in spans], device=device)[:, None]
    offsets = torch.arange(-int(lengths.max()) // _POSITIONS * -_POSITIONS, device=device)[None]
    return starts + torch.minimum(offsets, lengths - 1), offsets < lengths
