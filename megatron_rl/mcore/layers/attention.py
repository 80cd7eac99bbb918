"""Causal attention over packed sequences, for the local layer spec on CPUs and on GPUs."""

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

from megatron_rl.mcore.layers.varlen_attention import VarlenAttention
from megatron_rl.planning.rank_view import zigzag_rows

# The largest ratio of the longest to the shortest sequence in a padded bucket. It bounds the cost
# of the padding.
_MAX_LENGTH_RATIO = 1.25
# Padded lengths are multiples of this. They then fill whole vector registers, so that a row's sums
# do not depend on the padded length of its bucket.
_POSITION_MULTIPLE = 16


class PackedAttention(MegatronModule):
    """Causal attention over THD packing: [T, heads, dim] in, [T, heads * value dim] out.

    In half precision on CUDA it is torch's variable-length attention, if the installed torch has
    it. Otherwise sequences of similar length are padded into one batch. A causal query never sees
    the padding behind it.

    With context parallelism (rows of `zigzag_rows`) it always uses padded batches. Each rank
    gathers keys and values over the context-parallel group, which is a collective, and attends
    with its own queries.
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
        """Attend within each sequence. Raises ValueError without `packed_seq_params`.

        query: [T, heads, dim]. key and value: [T, groups, dim], where groups divides heads.
        """
        if packed_seq_params is None:
            raise ValueError("this attention takes packed sequences only: pass packed_seq_params")
        if self._cp_group is None and self._varlen.supports(query, key, value):
            output = self._varlen(
                query,
                key,
                value,
                cu_seqlens=packed_seq_params.cu_seqlens_q,
                max_seqlen=packed_seq_params.max_seqlen_q,
                scale=self._scale,
            )
            return output.reshape(query.shape[0], -1)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        return self._attend_in_buckets(query, key, value, bounds).reshape(query.shape[0], -1)

    def _attend_in_buckets(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bounds: Sequence[int],
    ) -> torch.Tensor:
        """Attend bucket by bucket and return the rows in the order of `query`."""
        query_rows = None
        if self._cp_group is not None:
            query_rows, (key, value) = _gather_sequences(bounds, (key, value), self._cp_group)
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            key = key.repeat_interleave(repeats, dim=1)
            value = value.repeat_interleave(repeats, dim=1)
        outputs = []
        positions = []
        for bucket in length_buckets(bounds):
            output, rows = self._attend(bucket, query, key, value, query_rows)
            outputs.append(output)
            positions.append(rows)
        order = torch.cat(positions).argsort()
        return torch.cat(outputs)[order]

    def _attend(
        self,
        bucket: Sequence[tuple[int, int]],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with the queries of one bucket.

        query_rows: the packed row of each query; None if there is a query for every row.

        Returns the outputs [rows, heads, dim] and the index of each in `query`.
        """
        keys, is_real_key = _padded_index(bucket, query.device)
        queries = keys
        is_real_query = is_real_key
        mask = None
        if query_rows is not None:
            ranks = len(key) // len(query)
            local_bucket = [(start // ranks, stop // ranks) for start, stop in bucket]
            queries, is_real_query = _padded_index(local_bucket, query.device)
            is_causal = keys[:, None, :] <= query_rows[queries][:, :, None]
            mask = (is_causal & is_real_key[:, None, :])[:, None]
        output = F.scaled_dot_product_attention(
            query[queries].transpose(1, 2),  # [b, heads, s, dim], and so on
            key[keys].transpose(1, 2),
            value[keys].transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
        )
        return output.transpose(1, 2)[is_real_query], queries[is_real_query]


def length_buckets(bounds: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Group the sequences [start, stop) of cumulative `bounds` by similar length.

    In each bucket the longest sequence is at most 25 % longer than the shortest. Empty sequences
    are in no bucket.
    """
    spans = sorted(
        ((start, stop) for start, stop in itertools.pairwise(bounds) if stop > start),
        key=lambda span: span[1] - span[0],
    )
    buckets: list[list[tuple[int, int]]] = []
    shortest = 0
    for start, stop in spans:
        if not buckets or stop - start > _MAX_LENGTH_RATIO * shortest:
            buckets.append([])
            shortest = stop - start
        buckets[-1].append((start, stop))
    return buckets


def _gather_sequences(
    bounds: Sequence[int], parts: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gather `parts` of all ranks, [T, ...], in packed order. Collective; gradients flow back.

    Returns the packed rows that this rank holds, and the gathered tensors.
    """
    size = group.size()
    offsets = np.array(bounds)
    device = parts[0].device
    rows = [torch.from_numpy(zigzag_rows(offsets, rank, size)).to(device) for rank in range(size)]
    order = torch.cat(rows).argsort()
    tensors = [gather_from_sequence_parallel_region(part, group=group)[order] for part in parts]
    return rows[group.rank()], tensors


def _padded_index(
    spans: Sequence[tuple[int, int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index the rows of a padded batch.

    Returns the row of each padded position, int64 [b, s], where padding repeats the last row of
    its sequence, and a mask of the real positions, bool [b, s]. s is a multiple of
    `_POSITION_MULTIPLE`.
    """
    starts = torch.tensor([start for start, _ in spans], device=device)[:, None]
    lengths = torch.tensor([stop - start for start, stop in spans], device=device)[:, None]
    padded_length = -int(lengths.max()) // _POSITION_MULTIPLE * -_POSITION_MULTIPLE
    offsets = torch.arange(padded_length, device=device)[None]
    return starts + torch.minimum(offsets, lengths - 1), offsets < lengths
