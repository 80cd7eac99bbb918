"""Decoding attention of many sequences at once, over a paged key-value cache, in plain torch.

Invariant: each query sees exactly its own sequence's keys. Sequences of similar length are padded to the longest among
them, in chunks of bounded size; padding never reaches a result.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import scaled_dot_product_attention

# Keys gathered at a time: their values and the queries' scores stay near a core's cache.
_MAX_KEYS = 65536


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None,
) -> torch.Tensor:
    """One query per sequence against all of that sequence's keys.

    query: [B, heads, D]. key_cache, value_cache: [cache slots, kv_heads, D]. slots: [table rows, >= longest], the cache
    slot of each position. rows: [B], the table row of each sequence. lengths: [B], how many keys each has, at least 1.
    Returns [B, heads, Dv].
    """
    output = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[-1])
    for chosen in _chunks(lengths):
        keys = lengths[chosen]
        longest = int(keys.max())
        table = slots[:, :longest].index_select(0, rows[chosen])
        visible = torch.arange(longest) < keys[:, None]
        # A slot past the end may be anything; the sequence's first one holds finite numbers.
        where = torch.where(visible, table, table[:, :1]).view(-1)
        output[chosen] = _attend(
            query[chosen],
            key_cache.index_select(0, where).view(len(keys), longest, *key_cache.shape[1:]),
            value_cache.index_select(0, where).view(len(keys), longest, *value_cache.shape[1:]),
            visible,
            scale,
        )
    return output


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """query [B, heads, D], key and value [B, L, kv_heads, D], visible [B, L] -> [B, heads, Dv].

    Query heads that share a key-value head are further queries of it: no key is repeated.
    """
    batch, heads, width = query.shape
    kv_heads = key.shape[2]
    result = scaled_dot_product_attention(
        query.view(batch, kv_heads, heads // kv_heads, width),
        key.transpose(1, 2).to(query.dtype),
        value.transpose(1, 2).to(query.dtype),
        attn_mask=visible[:, None, None],
        scale=scale,
    )
    return result.reshape(batch, heads, -1)


def _chunks(lengths: torch.Tensor) -> Iterator[torch.Tensor]:
    """Indices of sequences, all at once if they fit, else in order of length."""
    if len(lengths) * int(lengths.max()) <= _MAX_KEYS:
        yield torch.arange(len(lengths))
        return
    order = lengths.argsort(descending=True)
    start = 0
    while start < len(order):
        count = max(1, _MAX_KEYS // int(lengths[order[start]]))
        yield order[start : start + count]
        start += count
