"""Batched decoding attention against one call per sequence, the way SGLang's own backend does it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from sglang_bridge.cpu_shim import padded_attention
from sglang_bridge.cpu_shim.padded_attention import decode_attention

CACHE, TABLE_ROWS, TABLE_WIDTH = 500, 40, 64


def one_by_one(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    results = []
    for index, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        where = slots[row, :length].long()
        attended = scaled_dot_product_attention(
            query[index][:, None][None],
            key_cache[where].transpose(0, 1)[None],
            value_cache[where].transpose(0, 1)[None],
            enable_gqa=True,
            scale=scale,
        )
        results.append(attended[0, :, 0])
    return torch.stack(results)


def random_case(lengths: list[int], heads: int, kv_heads: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randint(0, CACHE, (TABLE_ROWS, TABLE_WIDTH), generator=generator, dtype=torch.int32)
    keys, values = (torch.randn(CACHE, kv_heads, 16, generator=generator) for _ in range(2))
    rows = torch.randperm(TABLE_ROWS, generator=generator)[: len(lengths)]
    query = torch.randn(len(lengths), heads, 16, generator=generator)
    return query, keys, values, slots, rows, torch.tensor(lengths)


@given(
    st.lists(st.integers(1, TABLE_WIDTH), min_size=1, max_size=20),
    st.sampled_from([(4, 4), (4, 2), (8, 1)]),
    st.sampled_from([1, 64, 200, 65536]),
)
def test_equals_one_call_per_sequence(lengths: list[int], heads: tuple[int, int], max_keys: int) -> None:
    case = random_case(lengths, *heads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padded_attention, "_MAX_KEYS", max_keys)  # forces chunks
        result = decode_attention(*case, scale=0.3)
    torch.testing.assert_close(result, one_by_one(*case, 0.3), rtol=0, atol=2e-6)


def test_what_lies_past_a_sequence_is_never_read() -> None:
    query, keys, values, slots, rows, lengths = random_case([3, 7], 4, 2)
    slots[rows[0], 3:] = CACHE - 1
    keys[CACHE - 1] = values[CACHE - 1] = float("nan")
    slots[rows[1], :7] = torch.arange(7, dtype=torch.int32)
    slots[rows[0], :3] = torch.arange(3, dtype=torch.int32)
    assert decode_attention(query, keys, values, slots, rows, lengths, scale=None).isfinite().all()


def test_a_cache_in_another_dtype_is_converted() -> None:
    query, keys, values, slots, rows, lengths = random_case([5, 9], 4, 2)
    half = decode_attention(query, keys.bfloat16(), values.bfloat16(), slots, rows, lengths, scale=0.3)
    assert half.dtype == torch.float32
    torch.testing.assert_close(
        half, one_by_one(query, keys.bfloat16().float(), values.bfloat16().float(), slots, rows, lengths, 0.3)
    )
