"""Shards of checkpoint tensors on the ranks of an engine."""

import pytest
import torch

from sglang_bridge.weights.expectation import WeightExpectation
from sglang_bridge.weights.fused_layout import RankPlace, first_expert, is_split_known, take_shard

LAYER = "model.layers.0"
MATRIX = torch.arange(64.0).view(8, 8)


def shard(name: str, rank: int, tp: int, ep: int = 1, heads: int = 8) -> torch.Tensor:
    return take_shard(name, MATRIX, RankPlace(rank, tp, ep), num_key_value_heads=heads)


@pytest.mark.parametrize("kind", ["self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj"])
def test_columns_of_outputs_are_rows_of_the_tensor(kind: str) -> None:
    assert torch.equal(shard(f"{LAYER}.{kind}.weight", 1, 4), MATRIX[2:4])


@pytest.mark.parametrize("kind", ["self_attn.o_proj", "mlp.down_proj"])
def test_inputs_are_columns_of_the_tensor(kind: str) -> None:
    assert torch.equal(shard(f"{LAYER}.{kind}.weight", 3, 4), MATRIX[:, 6:])


def test_ranks_beyond_the_number_of_heads_hold_copies_of_keys_and_values() -> None:
    name = f"{LAYER}.self_attn.k_proj.weight"
    halves = [shard(name, rank, 4, heads=2) for rank in range(4)]
    assert [half[0, 0].item() for half in halves] == [0, 0, 32, 32]
    assert all(half.shape == (4, 8) for half in halves)


@pytest.mark.parametrize("name", ["model.norm.weight", f"{LAYER}.mlp.gate.weight"])
def test_norms_and_routers_are_whole(name: str) -> None:
    assert is_split_known(name)
    assert torch.equal(shard(name, 1, 2), MATRIX)


def test_the_last_rank_holds_the_padding_of_the_vocabulary() -> None:
    last = shard("lm_head.weight", 1, 2)
    assert last.shape == (32, 8) and not last.any()
    assert torch.equal(shard("lm_head.weight", 0, 2)[:8], MATRIX)


def test_groups_of_ranks_share_the_experts_that_they_hold() -> None:
    """Four ranks, two groups: ranks 2 and 3 share the last experts."""
    name = f"{LAYER}.mlp.experts.5.down_proj.weight"
    assert torch.equal(shard(name, 2, 4, ep=2), MATRIX[:, :4])
    assert torch.equal(shard(name, 3, 4, ep=2), MATRIX[:, 4:])
    assert [first_expert(RankPlace(rank, 4, 2), 8) for rank in range(4)] == [0, 0, 4, 4]
    assert torch.equal(shard(name, 1, 2, ep=2), MATRIX)


def test_a_rank_expects_its_own_experts_alone() -> None:
    places = [RankPlace(rank, 2, 2) for rank in range(2)]
    expectation = WeightExpectation(dtype=torch.float32, num_experts=4, places=places)
    for expert in range(4):
        name = f"{LAYER}.mlp.experts.{expert}.down_proj.weight"
        expectation.add(name, MATRIX + expert)
    (parameter,) = expectation.checksums(places[1])
    names = [f"{LAYER}.mlp.experts.{expert}.down_proj.weight" for expert in (2, 3)]
    assert expectation.tensors_of(parameter, places[1]) == tuple(names)
    assert expectation.checksums(places[0]) != expectation.checksums(places[1])


def test_an_uneven_split_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"q_proj\.weight: 3 ranks .* cannot share the 8"):
        shard(f"{LAYER}.self_attn.q_proj.weight", 1, 3)


@pytest.mark.parametrize("kind", ["self_attn.kv_b_proj", "mlp.shared_experts.up_proj"])
def test_nothing_is_claimed_about_latent_attention_and_shared_experts(kind: str) -> None:
    assert not is_split_known(f"{LAYER}.{kind}.weight")
