"""Shards of checkpoint tensors on the ranks of an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

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


class Fp8Matrix:
    """A random FP8 weight [512, 256], whose values were computed block by block."""

    def __init__(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.codes = torch.randn(512, 256, generator=rng).to(torch.float8_e4m3fn)
        self.scales = torch.rand(4, 2, generator=rng) + 0.5
        blocks = self.scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        self.values = (self.codes.float() * blocks).bfloat16()

    def shard(self, dimension: int, rank: int, ranks: int) -> list[torch.Tensor]:
        """The part of a rank: values, codes and scales."""
        tensors = (self.values, self.codes, self.scales)
        return [tensor.chunk(ranks, dimension)[rank] for tensor in tensors]


def sha(tensors: Iterable[torch.Tensor]) -> str:
    data = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(data).hexdigest()[:16]


def checksums_of(
    matrices: Mapping[str, Fp8Matrix], place: RankPlace, heads: int = 1
) -> dict[str, str]:
    expectation = WeightExpectation(
        dtype=torch.float32, num_experts=2, places=[place], num_key_value_heads=heads
    )
    for name, matrix in matrices.items():
        expectation.add(f"{name}_scale_inv", matrix.scales)
        expectation.add(name, matrix.codes)
    return expectation.checksums(place)


def checksums_of_shards(parameter: str, shards: Iterable[Sequence[torch.Tensor]]) -> dict[str, str]:
    """The checksums of a parameter that fuses shards."""
    values, codes, scales = zip(*shards, strict=True)
    names = (parameter, f"{parameter}:codes", f"{parameter}_scale_inv")
    return dict(zip(names, map(sha, (values, codes, scales)), strict=True))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("heads", [1, 2])
def test_codes_and_scales_of_queries_and_keys_are_split_by_rows(rank: int, heads: int) -> None:
    """Both ranks hold all keys and values of a model with one head of them."""
    attention = f"{LAYER}.self_attn"
    matrices = {f"{attention}.{kind}_proj.weight": Fp8Matrix(i) for i, kind in enumerate("qkv")}
    q, k, v = matrices.values()
    shards = [q.shard(0, rank, 2)]
    shards += [matrix.shard(0, rank if heads == 2 else 0, heads) for matrix in (k, v)]
    checksums = checksums_of(matrices, RankPlace(rank, 2), heads)
    assert checksums == checksums_of_shards(f"{attention}.qkv_proj.weight", shards)


@pytest.mark.parametrize("rank", [0, 1])
def test_codes_and_scales_of_outputs_are_split_by_columns(rank: int) -> None:
    name = f"{LAYER}.self_attn.o_proj.weight"
    matrix = Fp8Matrix(3)
    checksums = checksums_of({name: matrix}, RankPlace(rank, 2))
    assert checksums == checksums_of_shards(name, [matrix.shard(1, rank, 2)])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("ep", [1, 2])
def test_codes_and_scales_of_experts_are_split_or_divided(rank: int, ep: int) -> None:
    experts = f"{LAYER}.mlp.experts"
    matrices = {f"{experts}.{e}.down_proj.weight": Fp8Matrix(e) for e in range(2)}
    first, second = matrices.values()
    shards = [matrix.shard(1, rank, 2) for matrix in (first, second)]
    if ep == 2:
        shards = [(first, second)[rank].shard(1, 0, 1)]
    checksums = checksums_of(matrices, RankPlace(rank, 2, ep))
    assert checksums == checksums_of_shards(f"{experts}.w2_weight", shards)


def test_an_uneven_split_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"q_proj\.weight: 3 ranks .* cannot share the 8"):
        shard(f"{LAYER}.self_attn.q_proj.weight", 1, 3)


@pytest.mark.parametrize("kind", ["self_attn.kv_b_proj", "mlp.shared_experts.up_proj"])
def test_nothing_is_claimed_about_latent_attention_and_shared_experts(kind: str) -> None:
    assert not is_split_known(f"{LAYER}.{kind}.weight")
