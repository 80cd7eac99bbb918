"""Attention of many sequences at once, over a paged key-value cache, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

# Of one chunk: keys gathered, and pairs of query and key. What is in work stays near a core's
# cache.
_MAX_KEYS = 2**16
_MAX_PAIRS = 2**20
# A row's sums must not depend on the others, as the trainer has others (`docs/on_policy.md`): the
# products inside take four rows of queries or more at a time, and whole vectors of keys, where
# those that are masked add zeros. Over more keys than `_WHOLE` MKL splits the sum by how many there
# are: then sequences of the same padded length go together.
_ROWS, _KEYS, _WHOLE = 4, 16, 192


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
) -> torch.Tensor:
    """Causal attention of packed queries, a sequence's queries being its last positions.

    query: [N, heads, D], sequences one after the other. key_cache, value_cache: [cache slots,
    kv_heads, D]. slots: [table rows, >= longest], the cache slot of each position. rows: [B], the
    table row of each sequence. num_keys, num_queries: [B], at least 1 each. Returns [N, heads, Dv].
    """
    output = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[-1])
    first_query = num_queries.cumsum(0) - num_queries
    steps = _ROWS // gcd(
        _ROWS, query.shape[1] // key_cache.shape[1]
    )  # each is a row for every head of a group
    for chosen in _chunks(num_keys, num_queries):
        keys, queries = num_keys[chosen, None], num_queries[chosen, None]
        # Surplus queries repeat their sequence's last one, so that they write what is there
        # already.
        step = torch.arange(_rounded(queries, steps)).minimum(queries - 1)
        positions = torch.arange(_padded(int(keys.max())))
        table = slots[:, : len(positions)].index_select(0, rows[chosen])
        if table.shape[1] < len(positions):
            table = pad(table, (0, len(positions) - table.shape[1]))
        # A slot past the end may be anything; the sequence's first one holds finite numbers.
        where = torch.where(positions < keys, table, table[:, :1]).view(-1)
        packed = first_query[chosen, None] + step
        output[packed] = _attend(
            query[packed],
            key_cache.index_select(0, where).view(*table.shape, *key_cache.shape[1:]),
            value_cache.index_select(0, where).view(*table.shape, *value_cache.shape[1:]),
            positions <= (keys - queries + step)[..., None],
            scale,
        )
    return output


def _rounded(counts: torch.Tensor, multiple: int) -> int:
    return -int(counts.max()) // multiple * -multiple


def _padded(keys: int) -> int:
    """Whole vectors of keys; of more than `_WHOLE` at most a quarter more, so that few lengths are
    left.
    """
    multiple = _KEYS if keys <= _WHOLE else 2 ** ((keys - 1).bit_length() - 3)
    return -keys // multiple * -multiple


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """query [B, T, heads, D], key and value [B, L, kv_heads, D], visible [B, T, L] -> [B, T, heads,
    Dv].

    Query heads that share a key-value head are further queries of it: no key is repeated.
    """
    batch, steps, heads, width = query.shape
    kv_heads = key.shape[2]
    shared = heads // kv_heads
    folded = query.view(batch, steps, kv_heads, shared, width).permute(0, 2, 3, 1, 4)
    mask = visible[:, None, None].expand(batch, 1, shared, steps, -1)
    result = scaled_dot_product_attention(
        folded.reshape(batch, kv_heads, shared * steps, width),
        key.transpose(1, 2).to(query.dtype),
        value.transpose(1, 2).to(query.dtype),
        attn_mask=mask.reshape(batch, 1, shared * steps, -1),
        scale=scale,
    )
    return (
        result.view(batch, kv_heads, shared, steps, -1)
        .permute(0, 3, 1, 2, 4)
        .reshape(batch, steps, heads, -1)
    )


def _chunks(num_keys: torch.Tensor, num_queries: torch.Tensor) -> Iterator[torch.Tensor]:
    """Indices of sequences: all at once if they fit, else in order of length."""
    lengths, counts = num_keys.tolist(), num_queries.tolist()
    keys = len(lengths) * max(lengths)
    if max(lengths) <= _WHOLE and keys <= _MAX_KEYS and keys * max(counts) <= _MAX_PAIRS:
        yield torch.arange(len(lengths))
        return
    chunk: list[int] = []
    together, queries = 0, 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        padded, queries = _padded(lengths[index]), max(queries, counts[index])
        size, length = (len(chunk) + 1) * padded, max(padded, _WHOLE)
        if chunk and (length != together or size > _MAX_KEYS or size * queries > _MAX_PAIRS):
            yield torch.tensor(chunk)
            chunk, queries = [], counts[index]
        chunk.append(index)
        together = length
    yield torch.tensor(chunk)
