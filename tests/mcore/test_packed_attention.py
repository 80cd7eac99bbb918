"""Attention over packed sequences in padded buckets."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=40))
def test_buckets_hold_every_sequence_once_and_bound_the_padding(
    megatron: Any, lengths: list[int]
) -> None:
    from megatron_rl.mcore.layers.attention import length_buckets

    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    buckets = length_buckets(bounds)
    spans = sorted(span for bucket in buckets for span in bucket)
    assert spans == [(a, b) for a, b in itertools.pairwise(bounds) if b > a]
    for bucket in buckets:
        sizes = [b - a for a, b in bucket]
        assert max(sizes) <= 1.25 * min(sizes)


def attend_each_alone(inputs: list[torch.Tensor], bounds: list[int]) -> torch.Tensor:
    """Causal attention of each sequence, written out: [T, heads * dim].

    inputs: query [T, heads, dim], and key and value with half as many heads.
    """
    rows = []
    for start, stop in itertools.pairwise(bounds):
        query, key, value = (tensor[start:stop] for tensor in inputs)
        key = key.repeat_interleave(2, dim=1)
        value = value.repeat_interleave(2, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[2] ** 0.5
        mask = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        rows.append(torch.einsum("hqk,khd->qhd", weights, value).flatten(1))
    return torch.cat(rows)


@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [7, 40, 9, 8, 1, 39], [3, 0, 4]])
def test_packed_attention_matches_each_sequence_alone(megatron: Any, lengths: list[int]) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_rl.mcore.layers.attention import PackedAttention

    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    generator = torch.Generator().manual_seed(sum(lengths))
    config: Any = SimpleNamespace(context_parallel_size=1)
    attention = PackedAttention(config, 1, None, "self")
    shapes = [(sum(lengths), heads, 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    output = attention(*inputs, None, packed_seq_params=params)
    expected_output = attend_each_alone(inputs, bounds.tolist())
    torch.testing.assert_close(output, expected_output, rtol=1e-5, atol=1e-6)
    seed = torch.randn(output.shape, generator=generator)
    gradients = torch.autograd.grad(output, inputs, seed)
    expected_gradients = torch.autograd.grad(expected_output, inputs, seed)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)
