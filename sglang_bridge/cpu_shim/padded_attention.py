"""Attention of many sequences at once, over a paged key-value cache, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from sglang_bridge.cpu_shim.small_products import least_rows

# A row's sums must not depend on the other rows, because the trainer has other rows
# (`docs/on_policy.md`). The products inside therefore take at least `least_rows` rows of queries
# and whole vectors of `_KEY_VECTOR` keys, where masked keys add zeros. Over more keys than
# `_MAX_UNSPLIT_KEYS`, MKL splits the sum by their number, and only sequences of the same padded
# length share a chunk.
_KEY_VECTOR = 16
_MAX_UNSPLIT_KEYS = 192


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    num_keys: torch.Tensor,
    num_queries: torch.Tensor,
    *,
    scale: float | None,
    max_keys: int = 2**16,
    max_pairs: int = 2**20,
) -> torch.Tensor:
    """Causal attention of packed queries, a sequence's queries being its last positions.

    query: [N, heads, D], sequences one after the other. key_cache, value_cache: [cache slots,
    kv_heads, D]. slots: [table rows, >= longest], the cache slot of each position. rows: [B], the
    table row of each sequence. num_keys, num_queries: [B], at least 1 each. max_keys, max_pairs:
    limits of one chunk, gathered keys and pairs of query and key, so that its working set stays
    near a core's cache. Returns [N, heads, Dv].
    """
    output = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[-1])
    first_query = num_queries.cumsum(0) - num_queries
    # Each query step gives a row for every query head of a key-value head.
    query_rows = least_rows(query.shape[2])
    step_multiple = query_rows // gcd(query_rows, query.shape[1] // key_cache.shape[1])
    for chunk in _chunks(num_keys, num_queries, max_keys, max_pairs):
        keys = num_keys[chunk, None]
        queries = num_queries[chunk, None]
        # Surplus steps repeat their sequence's last query, so that they write the same result.
        steps = torch.arange(_round_up(queries, step_multiple)).minimum(queries - 1)
        positions = torch.arange(_padded_length(int(keys.max())))
        table = _slot_table(slots, rows[chunk], positions, keys)
        query_index = first_query[chunk, None] + steps
        output[query_index] = _attend(
            query[query_index],
            _gather(key_cache, table),
            _gather(value_cache, table),
            positions <= (keys - queries + steps)[..., None],
            scale,
        )
    return output


def _slot_table(
    slots: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Cache slots [B, L] of padded positions [L]. keys: [B, 1], the length of each sequence."""
    table = slots[:, : len(positions)].index_select(0, rows)
    if table.shape[1] < len(positions):
        table = pad(table, (0, len(positions) - table.shape[1]))
    # A slot past the end may hold anything. The sequence's first slot holds finite numbers.
    return torch.where(positions < keys, table, table[:, :1])


def _gather(cache: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """cache [slots, heads, D], table [B, L] -> [B, L, heads, D]."""
    return cache.index_select(0, table.view(-1)).view(*table.shape, *cache.shape[1:])


def _round_up(counts: torch.Tensor, multiple: int) -> int:
    return -int(counts.max()) // multiple * -multiple


def _padded_length(keys: int) -> int:
    """Round up to whole vectors of keys.

    A length above `_MAX_UNSPLIT_KEYS` grows by at most a quarter, so that few lengths remain.
    """
    multiple = _KEY_VECTOR
    if keys > _MAX_UNSPLIT_KEYS:
        multiple = 2 ** ((keys - 1).bit_length() - 3)
    return -keys // multiple * -multiple


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Attend to the visible keys: [B, T, heads, Dv].

    query: [B, T, heads, D]. key, value: [B, L, kv_heads, D]. visible: [B, T, L]. Query heads that
    share a key-value head become further queries of it, so no key is repeated.
    """
    batch, steps, heads, width = query.shape
    kv_heads = key.shape[2]
    group_size = heads // kv_heads
    grouped_query = query.view(batch, steps, kv_heads, group_size, width).permute(0, 2, 3, 1, 4)
    mask = visible[:, None, None].expand(batch, 1, group_size, steps, -1)
    result = scaled_dot_product_attention(
        grouped_query.reshape(batch, kv_heads, group_size * steps, width),
        key.transpose(1, 2).to(query.dtype),
        value.transpose(1, 2).to(query.dtype),
        attn_mask=mask.reshape(batch, 1, group_size * steps, -1),
        scale=scale,
    )
    return (
        result.view(batch, kv_heads, group_size, steps, -1)
        .permute(0, 3, 1, 2, 4)
        .reshape(batch, steps, heads, -1)
    )


def _chunks(
    num_keys: torch.Tensor, num_queries: torch.Tensor, max_keys: int, max_pairs: int
) -> Iterator[torch.Tensor]:
    """Yield indices of sequences: all at once if they fit, else in order of length."""
    lengths = num_keys.tolist()
    counts = num_queries.tolist()
    keys = len(lengths) * max(lengths)
    is_short = max(lengths) <= _MAX_UNSPLIT_KEYS and keys <= max_keys
    if is_short and keys * max(counts) <= max_pairs:
        yield torch.arange(len(lengths))
        return
    chunk: list[int] = []
    chunk_length = 0
    queries = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        padded_length = _padded_length(lengths[index])
        queries = max(queries, counts[index])
        size = (len(chunk) + 1) * padded_length
        length = max(padded_length, _MAX_UNSPLIT_KEYS)
        is_full = size > max_keys or size * queries > max_pairs
        if chunk and (length != chunk_length or is_full):
            yield torch.tensor(chunk)
            chunk = []
            queries = counts[index]
        chunk.append(index)
        chunk_length = length
    yield torch.tensor(chunk)
