"""Names and shapes of Megatron parameters in Hugging Face checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.mcore.weights.layout import join, join_shards, layout_of, shard, split
from megatron_rl.models.names import Fusion
from megatron_rl.models.qwen3_moe import NAMES


@pytest.mark.parametrize(
    ("name", "hf_names", "fusion", "expert"),
    [
        (
            "embedding.word_embeddings.weight",
            ("model.embed_tokens.weight",),
            Fusion.VOCABULARY,
            None,
        ),
        ("output_layer.weight", ("lm_head.weight",), Fusion.VOCABULARY, None),
        (
            "decoder.layers.0.mlp.router.weight",
            ("model.layers.3.mlp.gate.weight",),
            Fusion.REPLICATED,
            None,
        ),
        (
            "decoder.layers.1.self_attention.linear_qkv.weight",
            tuple(f"model.layers.4.self_attn.{x}_proj.weight" for x in "qkv"),
            Fusion.QKV,
            None,
        ),
        (
            "decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight",
            tuple(f"model.layers.3.mlp.experts.6.{x}_proj.weight" for x in ("gate", "up")),
            Fusion.GATED,
            2,
        ),
        (
            "decoder.layers.0.mlp.experts.linear_fc2.weight2",
            ("model.layers.3.mlp.experts.6.down_proj.weight",),
            Fusion.COLUMNS,
            2,
        ),
    ],
)
def test_names_follow_the_layer_and_expert_offsets(
    name: str, hf_names: tuple[str, ...], fusion: Fusion, expert: int | None
) -> None:
    layout = layout_of(name, NAMES, layer_offset=3, expert_offset=4)
    assert (layout.hf_names, layout.fusion, layout.expert) == (hf_names, fusion, expert)


@pytest.mark.parametrize(
    "name", ["decoder.layers.0.mlp.router.expert_bias", "something.else", "decoder.layers.x.y"]
)
def test_error_names_a_parameter_without_a_counterpart(name: str) -> None:
    with pytest.raises(KeyError, match=name):
        layout_of(name, NAMES, layer_offset=0, expert_offset=0)


def test_query_groups_are_interleaved() -> None:
    model: Any = SimpleNamespace(num_key_value_heads=2, num_attention_heads=4, head_dim=1)
    q, k, v = (torch.tensor([[float(x)] for x in rows]) for rows in ((1, 2, 3, 4), (5, 6), (7, 8)))
    weight = join(Fusion.QKV, [q, k, v], model)
    # Group 0 is q q k v, and so is group 1.
    assert weight.flatten().tolist() == [1, 2, 5, 7, 3, 4, 6, 8]
    parts = split(Fusion.QKV, weight, model)
    assert all(torch.equal(a, b) for a, b in zip(parts, (q, k, v), strict=True))


def test_gated_shard_holds_its_part_of_gate_and_up() -> None:
    weight = torch.tensor([[1.0], [2.0], [3.0], [4.0]])  # gate 1 2, up 3 4
    assert shard(Fusion.GATED, weight, 0, 2).flatten().tolist() == [1, 3]
    assert shard(Fusion.GATED, weight, 1, 2).flatten().tolist() == [2, 4]


@settings(max_examples=25, deadline=None)
@given(
    fusion=st.sampled_from(list(Fusion)),
    size=st.sampled_from([1, 2, 4]),
    hidden_size=st.sampled_from([4, 8]),
)
def test_shards_join_to_the_whole_parameter(fusion: Fusion, size: int, hidden_size: int) -> None:
    whole = torch.arange(16 * hidden_size, dtype=torch.float32).reshape(16, hidden_size)
    shards = [shard(fusion, whole, rank, size) for rank in range(size)]
    assert torch.equal(join_shards(fusion, shards), whole)
