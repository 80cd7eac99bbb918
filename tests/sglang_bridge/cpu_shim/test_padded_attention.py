"""Batched attention against one call per sequence, the way SGLang's own backend does it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from sglang_bridge.cpu_shim.padded_attention import paged_attention

CACHE = 500
TABLE_ROWS = 40
TABLE_WIDTH = 64
SCALE = 0.3


def one_by_one(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    num_keys: torch.Tensor,
    num_queries: torch.Tensor,
) -> torch.Tensor:
    results = []
    start = 0
    for row, keys, queries in zip(
        rows.tolist(), num_keys.tolist(), num_queries.tolist(), strict=True
    ):
        where = slots[row, :keys].long()
        attention = scaled_dot_product_attention(
            query[start : start + queries].transpose(0, 1)[None],
            key_cache[where].transpose(0, 1)[None],
            value_cache[where].transpose(0, 1)[None],
            attn_mask=torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries),
            enable_gqa=True,
            scale=SCALE,
        )
        results.append(attention[0].transpose(0, 1))
        start += queries
    return torch.cat(results)


def random_case(
    lengths: list[tuple[int, int]], heads: int, kv_heads: int
) -> tuple[torch.Tensor, ...]:
    """Sequences of (keys, queries)."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.randint(
        0, CACHE, (TABLE_ROWS, TABLE_WIDTH), generator=generator, dtype=torch.int32
    )
    keys, values = (torch.randn(CACHE, kv_heads, 16, generator=generator) for _ in range(2))
    rows = torch.randperm(TABLE_ROWS, generator=generator)[: len(lengths)]
    num_keys, num_queries = (torch.tensor(column) for column in zip(*lengths, strict=True))
    query = torch.randn(int(num_queries.sum()), heads, 16, generator=generator)
    return query, keys, values, slots, rows, num_keys, num_queries


sequences = st.integers(1, TABLE_WIDTH).flatmap(
    lambda keys: st.tuples(st.just(keys), st.integers(1, keys))
)
decoding = st.integers(1, TABLE_WIDTH).map(lambda keys: (keys, 1))


@pytest.mark.slow
@given(
    st.one_of(
        st.lists(decoding, min_size=1, max_size=20), st.lists(sequences, min_size=1, max_size=20)
    ),
    st.sampled_from([(4, 4), (4, 2), (8, 1)]),
    st.sampled_from([(1, 1), (64, 2**20), (200, 2000), (65536, 2**20)]),
)
def test_batched_attention_equals_one_call_per_sequence(
    lengths: list[tuple[int, int]], heads: tuple[int, int], limits: tuple[int, int]
) -> None:
    """Small limits force chunks."""
    case = random_case(lengths, *heads)
    result = paged_attention(*case, scale=SCALE, max_keys=limits[0], max_pairs=limits[1])
    torch.testing.assert_close(result, one_by_one(*case), rtol=0, atol=3e-6)


def test_slots_past_a_sequence_are_never_read() -> None:
    query, keys, values, slots, rows, num_keys, num_queries = random_case([(3, 2), (7, 1)], 4, 2)
    slots[rows[0], 3:] = CACHE - 1
    keys[CACHE - 1] = values[CACHE - 1] = float("nan")
    slots[rows[1], :7] = torch.arange(7, dtype=torch.int32)
    slots[rows[0], :3] = torch.arange(3, dtype=torch.int32)
    assert (
        paged_attention(query, keys, values, slots, rows, num_keys, num_queries, scale=None)
        .isfinite()
        .all()
    )


def test_cache_in_another_dtype_is_converted() -> None:
    query, keys, values, *rest = random_case([(5, 1), (9, 4)], 4, 2)
    result = paged_attention(query, keys.bfloat16(), values.bfloat16(), *rest, scale=SCALE)
    assert result.dtype == torch.float32
    torch.testing.assert_close(
        result, one_by_one(query, keys.bfloat16().float(), values.bfloat16().float(), *rest)
    )
