"""A CPU engine and the trainer get the same float32 bits for the same row, whatever is computed
beside it.

`tests/engine/test_parity.py` compares whole models, `launch/studies/layer_differences/__main__.py` shows each
operation of a real engine. Equality is MKL's and torch's on this kind of processor
(docs/on_policy.md); on others the sums are only close.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.testbed.packed_sequences import pack
from sglang_bridge.cpu_shim.padded_attention import paged_attention
from sglang_bridge.cpu_shim.trainer_sums import experts, linear, route
from tests.mcore.test_replay import build
from tests.support.exactness import EXACT

LONGEST = 192  # keys: beyond, MKL splits the sum over them


def assert_same(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    if EXACT:
        assert torch.equal(mine, theirs), f"largest difference {(mine - theirs).abs().max():.1e}"
    else:
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As engines and ranks have: threads share the rows of a product, and few are left for each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("columns", [8, 48, 128])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 17])
def test_a_row_of_a_product_is_the_same_alone_and_among_many(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, 64, generator=generator) for n in (500, columns))
    assert_same(linear(x[:rows], weight), linear(x, weight)[:rows])


def attended(lengths: list[int], heads: tuple[int, int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Attention as an engine decodes the last token of each sequence, and as it reads all; each
    with the trainer's.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_rl.mcore.layers.attention import PackedAttention

    generator = torch.Generator().manual_seed(sum(lengths))
    total, bounds = sum(lengths), torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    query, key, value = (
        torch.randn(total, n, 16, generator=generator) for n in (heads[0], heads[1], heads[1])
    )
    config: Any = SimpleNamespace(context_parallel_size=1)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    packed = PackedAttention(config, 1, None, "self")(
        query, key, value, None, packed_seq_params=params
    )
    slots = torch.zeros(len(lengths), max(lengths), dtype=torch.int32)
    for row, (start, length) in enumerate(zip(bounds.tolist(), lengths, strict=False)):
        slots[row, :length] = torch.arange(start, start + length)
    last = bounds[1:].long() - 1
    every, one = torch.arange(len(lengths)), torch.ones(len(lengths), dtype=torch.int64)
    decoded = paged_attention(
        query[last], key, value, slots, every, torch.tensor(lengths), one, scale=None
    )
    whole = paged_attention(
        query, key, value, slots, every, torch.tensor(lengths), torch.tensor(lengths), scale=None
    )
    return [(decoded.flatten(1), packed[last]), (whole.flatten(1), packed)]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=12),
    heads=st.sampled_from([(4, 2), (8, 1), (4, 4)]),
)
def test_attention_in_a_prefill_in_decoding_and_in_a_packed_pass_is_the_same(
    megatron: Any, lengths: list[int], heads: tuple[int, int]
) -> None:
    for mine, theirs in attended(lengths, heads):
        assert_same(mine, theirs)


def test_attention_over_more_keys_is_close(megatron: Any) -> None:
    for mine, theirs in attended([300, 700], (4, 2)):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 1500), min_size=1, max_size=8),
    heads=st.sampled_from([(4, 2), (8, 1), (4, 4)]),
    queries=st.integers(1, 40),
)
def test_a_sequence_is_attended_alike_alone_and_among_others(
    lengths: list[int], heads: tuple[int, int], queries: int
) -> None:
    """However many keys there are, and however many of the last tokens are read at once."""
    generator = torch.Generator().manual_seed(sum(lengths))
    num_keys = torch.tensor(lengths)
    num_queries = num_keys.clamp(max=queries)
    key, value = (torch.randn(sum(lengths), heads[1], 16, generator=generator) for _ in range(2))
    query = torch.randn(int(num_queries.sum()), heads[0], 16, generator=generator)
    slots = (num_keys.cumsum(0) - num_keys)[:, None] + torch.arange(max(lengths))
    slots = slots.clamp(max=sum(lengths) - 1).to(torch.int32)
    together = paged_attention(
        query, key, value, slots, torch.arange(len(lengths)), num_keys, num_queries, scale=None
    )
    parts = zip(
        query.split(num_queries.tolist()), together.split(num_queries.tolist()), strict=True
    )
    for i, (mine, among) in enumerate(parts):
        rows, each = torch.tensor([i]), (num_keys[i : i + 1], num_queries[i : i + 1])
        assert_same(paged_attention(mine, key, value, slots, rows, *each, scale=None), among)


def weights_of(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What an engine holds of a layer's experts: gate and up one above the other, and down."""
    each = layer.mlp.experts.local_experts
    return torch.stack([e.linear_fc1.weight for e in each]), torch.stack(
        [e.linear_fc2.weight for e in each]
    )


@pytest.mark.parametrize("tokens", [(0, 1, 2), (3,)])
def test_experts_are_weighed_and_added_as_megatron_does(
    megatron: Any, checkpoint: Path, tokens: tuple[int, ...]
) -> None:
    """With few tokens most experts get one to three."""
    from megatron_rl.mcore.schedule import run_schedule

    models, replay = build(checkpoint)
    seen: list[tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    layers = [layer for layer in models[0].module.decoder.layers if hasattr(layer.mlp, "experts")]
    for layer in layers:
        layer.mlp.router.register_forward_hook(
            lambda module, inputs, out, layer=layer: seen.append(
                (layer, inputs[0].detach(), out[0].detach(), out[1])
            )
        )
    outputs: list[torch.Tensor] = []
    for layer in layers:
        layer.mlp.register_forward_hook(lambda module, inputs, out: outputs.append(out[0].detach()))
    batch = pack(tokens, range(3))
    run_schedule(
        models, [batch], lambda logits, index: (None, None), forward_only=True, replay=replay
    )
    assert len(seen) == len(outputs) == 3
    for number, ((layer, x, probabilities, chosen), output) in enumerate(
        zip(seen, outputs, strict=True)
    ):
        ids = batch.routes[:, number].int()
        assert torch.equal(chosen.sum(1), torch.full((len(ids),), 2))
        mine = experts(
            x.flatten(0, 1), *weights_of(layer), probabilities.gather(1, ids.long()), ids
        )
        assert_same(mine.detach(), output.flatten(0, 1))


def test_many_experts_are_added_from_the_first_to_the_last() -> None:
    generator = torch.Generator().manual_seed(5)
    x, gate_up, down, logits = (
        torch.randn(*shape, generator=generator)
        for shape in ((40, 64), (16, 64, 64), (16, 64, 32), (40, 16))
    )
    weights, ids = route(logits, 8)
    expected = torch.zeros_like(x)
    for expert in range(16):
        rows, place = (ids == expert).nonzero(as_tuple=True)
        gate, up = linear(x[rows], gate_up[expert]).chunk(2, -1)
        expected[rows] += linear(F.silu(gate) * up * weights[rows, place, None], down[expert])
    assert_same(experts(x, gate_up, down, weights, ids), expected)


def test_a_live_choice_is_megatrons(megatron: Any) -> None:
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(2))
    weights, ids = route(logits, 2)
    probabilities, chosen = topk_routing_with_score_function(logits, 2)
    assert ids.dtype == torch.int32
    assert torch.equal(torch.zeros(50, 8, dtype=torch.bool).scatter(1, ids.long(), True), chosen)
    assert_same(weights, probabilities.gather(1, ids.long()))
