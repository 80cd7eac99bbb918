"""A CPU engine and the trainer compute the same float32 bits for the same row.

The other rows of the batch make no difference. `tests/engine/test_parity.py` compares whole models,
and `tests/lab/layer_differences` shows each operation of a real engine. Equality depends on
MKL and torch for this kind of processor (docs/on_policy.md). On other processors the sums are only
close.
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

from sglang_bridge.cpu_shim.padded_attention import paged_attention
from sglang_bridge.cpu_shim.trainer_sums import experts, linear, route
from tests.mcore.replayed_models import build
from tests.support.exactness import EXACT
from tests.support.packed_sequences import pack

# With more keys MKL splits the sum over them.
MAX_EXACT_KEYS = 192


def assert_same(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    if EXACT:
        assert torch.equal(mine, theirs), f"largest difference {(mine - theirs).abs().max():.1e}"
    else:
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, as engines and ranks do. Several threads share the rows of a product."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("columns", [8, 48, 128])
@pytest.mark.parametrize("width", [16, 64, 96, 128, 192, 256, 512, 768, 2048])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 12, 15, 17])
def test_row_of_a_product_does_not_depend_on_the_number_of_rows(
    rows: int, width: int, columns: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(500, width, generator=generator)
    weight = torch.randn(columns, width, generator=generator)
    assert_same(linear(x[:rows], weight), linear(x, weight)[:rows])


class PackedInputs:
    """Random queries, keys and values of packed sequences."""

    def __init__(self, lengths: list[int], heads: tuple[int, int]) -> None:
        generator = torch.Generator().manual_seed(sum(lengths))
        query_heads, groups = heads
        self.lengths = torch.tensor(lengths)
        self.query = torch.randn(sum(lengths), query_heads, 16, generator=generator)
        self.key = torch.randn(sum(lengths), groups, 16, generator=generator)
        self.value = torch.randn(sum(lengths), groups, 16, generator=generator)
        self.bounds = torch.tensor([0, *lengths]).cumsum(0)

    @property
    def slots(self) -> torch.Tensor:
        """The packed row of each key: int32 [sequences, longest length]."""
        slots = torch.zeros(len(self.lengths), int(self.lengths.max()), dtype=torch.int32)
        for row, (start, length) in enumerate(zip(self.bounds, self.lengths, strict=False)):
            slots[row, :length] = torch.arange(int(start), int(start + length))
        return slots


def trainer_attention(inputs: PackedInputs) -> torch.Tensor:
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_rl.mcore.layers.attention import PackedAttention

    bounds = inputs.bounds.to(torch.int32)
    config: Any = SimpleNamespace(context_parallel_size=1)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    attention = PackedAttention(config, 1, None, "self")
    output: torch.Tensor = attention(
        inputs.query, inputs.key, inputs.value, None, packed_seq_params=params
    )
    return output


def engine_attention(
    inputs: PackedInputs,
    query: torch.Tensor,
    num_queries: torch.Tensor,
    sequences: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with the last queries of each sequence, as an engine does.

    num_queries: of every sequence.
    sequences: the indices of the sequences in this call; None means all.
    """
    if sequences is None:
        sequences = torch.arange(len(inputs.lengths))
    output = paged_attention(
        query,
        inputs.key,
        inputs.value,
        inputs.slots,
        sequences,
        inputs.lengths[sequences],
        num_queries[sequences],
        scale=None,
    )
    return output.flatten(1)


def attention_pairs(
    lengths: list[int], heads: tuple[int, int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the outputs of engine and trainer, in decoding and in a prefill."""
    inputs = PackedInputs(lengths, heads)
    trainer_output = trainer_attention(inputs)
    last_rows = inputs.bounds[1:] - 1
    one_query = torch.ones(len(lengths), dtype=torch.int64)
    decoding = engine_attention(inputs, inputs.query[last_rows], one_query)
    prefill = engine_attention(inputs, inputs.query, inputs.lengths)
    return [(decoding, trainer_output[last_rows]), (prefill, trainer_output)]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, MAX_EXACT_KEYS), min_size=1, max_size=12),
    heads=st.sampled_from([(4, 2), (8, 1), (4, 4)]),
)
def test_attention_is_the_same_in_prefill_decoding_and_training(
    megatron: Any, lengths: list[int], heads: tuple[int, int]
) -> None:
    for mine, theirs in attention_pairs(lengths, heads):
        assert_same(mine, theirs)


def test_attention_over_more_keys_is_close(megatron: Any) -> None:
    for mine, theirs in attention_pairs([300, 700], (4, 2)):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 1500), min_size=1, max_size=8),
    heads=st.sampled_from([(4, 2), (8, 1), (4, 4)]),
    queries=st.integers(1, 40),
)
def test_attention_of_a_sequence_does_not_depend_on_other_sequences(
    lengths: list[int], heads: tuple[int, int], queries: int
) -> None:
    """This holds for any number of keys, and of last tokens that are read at once."""
    inputs = PackedInputs(lengths, heads)
    num_queries = inputs.lengths.clamp(max=queries)
    stops = inputs.bounds[1:]
    queries_by_sequence = [
        inputs.query[stop - count : stop] for stop, count in zip(stops, num_queries, strict=True)
    ]
    batch_output = engine_attention(inputs, torch.cat(queries_by_sequence), num_queries)
    batch_outputs = batch_output.split(num_queries.tolist())
    for i, query in enumerate(queries_by_sequence):
        output = engine_attention(inputs, query, num_queries, torch.tensor([i]))
        assert_same(output, batch_outputs[i])


def engine_weights(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of a layer's experts as an engine stacks them: gate over up, and down."""
    local_experts = layer.mlp.experts.local_experts
    gate_up = torch.stack([expert.linear_fc1.weight for expert in local_experts])
    down = torch.stack([expert.linear_fc2.weight for expert in local_experts])
    return gate_up, down


class LayerCall:
    """Inputs and outputs of a MoE layer's router and experts."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        layer.mlp.router.register_forward_hook(self._record_router)
        layer.mlp.register_forward_hook(self._record_experts)

    def _record_router(self, module: Any, inputs: Any, output: Any) -> None:
        self.input = inputs[0].detach().flatten(0, 1)
        self.probabilities = output[0].detach()
        self.routing_map = output[1]

    def _record_experts(self, module: Any, inputs: Any, output: Any) -> None:
        self.output = output[0].detach().flatten(0, 1)


@pytest.mark.parametrize("tokens", [(0, 1, 2), (3,)])
def test_experts_are_weighted_and_added_as_in_megatron(
    megatron: Any, checkpoint: Path, tokens: tuple[int, ...]
) -> None:
    """With few tokens most experts get one to three of them."""
    from megatron_rl.mcore.schedule import run_schedule

    models, replay = build(checkpoint)
    layers = [layer for layer in models[0].module.decoder.layers if hasattr(layer.mlp, "experts")]
    calls = [LayerCall(layer) for layer in layers]
    batch = pack(tokens, range(3))
    run_schedule(
        models, [batch], lambda logits, index: (None, None), forward_only=True, replay=replay
    )
    assert len(calls) == 3
    for number, call in enumerate(calls):
        ids = batch.routes[:, number].int()
        assert torch.equal(call.routing_map.sum(1), torch.full((len(ids),), 2))
        weights = call.probabilities.gather(1, ids.long())
        engine_output = experts(call.input, *engine_weights(call.layer), weights, ids)
        assert_same(engine_output.detach(), call.output)


def test_many_experts_are_added_from_the_first_to_the_last() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(40, 64, generator=generator)
    gate_up = torch.randn(16, 64, 64, generator=generator)
    down = torch.randn(16, 64, 32, generator=generator)
    logits = torch.randn(40, 16, generator=generator)
    weights, ids = route(logits, 8)
    expected_output = torch.zeros_like(x)
    for expert in range(16):
        rows, place = (ids == expert).nonzero(as_tuple=True)
        gate, up = linear(x[rows], gate_up[expert]).chunk(2, -1)
        activation = F.silu(gate) * up * weights[rows, place, None]
        expected_output[rows] += linear(activation, down[expert])
    assert_same(experts(x, gate_up, down, weights, ids), expected_output)


def test_live_choice_of_the_engine_matches_megatron(megatron: Any) -> None:
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(2))
    weights, ids = route(logits, 2)
    probabilities, routing_map = topk_routing_with_score_function(logits, 2)
    assert ids.dtype == torch.int32
    engine_map = torch.zeros(50, 8, dtype=torch.bool).scatter(1, ids.long(), True)
    assert torch.equal(engine_map, routing_map)
    assert_same(weights, probabilities.gather(1, ids.long()))
