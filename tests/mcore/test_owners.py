"""Owners of tensors over grids of ranks: exactly one each, balanced, and Megatron's own ranks."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_rl.mcore import compat

compat.install()

from megatron.core.parallel_state import RankGenerator
from megatron.core.resharding.planner import _determine_source_ranks_for_dst_param
from megatron.core.resharding.utils import ParameterMetadata

from megatron_rl.mcore.weights.layout import join_shards, shard
from megatron_rl.mcore.weights.owners import (
    Grid,
    Owner,
    Unit,
    collectors_of_stage,
    count_owners,
    owners_of_stage,
)
from megatron_rl.models.names import Fusion

SIZES = st.sampled_from([1, 2, 4])


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    tp, cp, pp, ep, etp = (draw(SIZES) for _ in range(5))
    common = max(tp * cp, ep * etp)
    assume(common % (tp * cp) == 0 and common % (ep * etp) == 0)
    return Grid(common * draw(SIZES) * pp, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)


def units_of(grid: Grid, layers: int = 3, experts: int = 2) -> list[Unit]:
    """A vocabulary, and layers with attention, a norm and local experts."""
    units = [Unit("embedding", 4000)]
    for layer in range(layers):
        units += [Unit(f"{layer}.attention", 900), Unit(f"{layer}.norm", 8)]
        for ep_rank in range(grid.ep):
            for expert in range(experts):
                units.append(Unit(f"{layer}.{ep_rank}.{expert}.w13", 400, ep_rank))
                units.append(Unit(f"{layer}.{ep_rank}.{expert}.w2", 200, ep_rank))
    return units


@given(grids(), st.integers(1, 9))
def test_every_unit_has_one_owner_that_holds_a_shard_of_it(grid: Grid, max_owners: int) -> None:
    units = units_of(grid)
    for stage in range(grid.pp):
        owners = owners_of_stage(units, grid, stage, max_owners=max_owners)
        assert set(owners) == {unit.key for unit in units}
        for unit in units:
            owner = owners[unit.key]
            assert owner.rank in owner.shards
            copies = grid.dense_holders(stage)
            if unit.ep_rank is not None:
                copies = grid.expert_holders(stage, unit.ep_rank)
            assert owner.shards in copies


@pytest.mark.slow
@given(grids(), st.integers(1, 9))
def test_owners_are_counted_without_units(grid: Grid, max_owners: int) -> None:
    units = units_of(grid, layers=9, experts=9)
    owners = [
        owners_of_stage(units, grid, stage, max_owners=max_owners) for stage in range(grid.pp)
    ]
    ranks = {owner.rank for of_stage in owners for owner in of_stage.values()}
    assert len(ranks) == count_owners(grid, max_owners=max_owners)


@given(grids(), st.integers(1, 9))
def test_owners_are_capped_but_each_expert_rank_has_one(grid: Grid, max_owners: int) -> None:
    for stage in range(grid.pp):
        owners = owners_of_stage(units_of(grid), grid, stage, max_owners=max_owners).values()
        ranks = {owner.rank for owner in owners}
        assert len(ranks) <= max(max_owners, grid.ep)
        assert {grid.stage_of(rank) for rank in ranks} == {stage}


@given(grids())
def test_replicas_share_the_bytes(grid: Grid) -> None:
    """No owner has more than its share and one unit: units do not divide."""
    units = units_of(grid, layers=8)
    owners = owners_of_stage(units, grid, 0, max_owners=8)
    loads = Counter[int]()
    for unit in units:
        loads[owners[unit.key].rank] += unit.num_bytes
    largest = max(unit.num_bytes for unit in units)
    candidates = len(loads)
    assert max(loads.values()) <= sum(loads.values()) / candidates + largest


@given(grids(), st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_the_units(grid: Grid, random: object) -> None:
    units = units_of(grid)
    shuffled_units = list(units)
    random.shuffle(shuffled_units)  # type: ignore[attr-defined]
    assert owners_of_stage(units, grid, 0) == owners_of_stage(shuffled_units, grid, 0)


def test_golden_plan_of_two_expert_ranks() -> None:
    """By hand: rank 0 has experts of 600, gets 500 more, and then rank 1 with 700 is next."""
    units = [
        Unit("experts 0", 600, 0),
        Unit("experts 1", 700, 1),
        Unit("embedding", 500),
        Unit("attention", 300),
        Unit("norm", 1),
    ]
    owners = owners_of_stage(units, Grid(2, ep=2), 0)
    assert {key: owner.rank for key, owner in owners.items()} == {
        "experts 0": 0,
        "experts 1": 1,
        "embedding": 0,
        "attention": 1,
        "norm": 1,
    }


def test_tensor_parallel_ranks_share_the_bytes_and_gather_each_other_s_shards() -> None:
    owners = owners_of_stage([Unit("a", 10), Unit("b", 10)], Grid(2, tp=2), 0)
    assert owners == {"a": Owner(0, (0, 1)), "b": Owner(1, (0, 1))}


def test_candidates_are_spread_over_the_stage() -> None:
    units = [Unit(str(i), 10) for i in range(4)]
    owners = owners_of_stage(units, Grid(64, tp=4), 0, max_owners=4)
    assert {owner.rank for owner in owners.values()} == {0, 16, 32, 48}


def test_a_unit_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unit a: twice in pipeline stage 0"):
        owners_of_stage([Unit("a", 1), Unit("a", 2)], Grid(1), 0)


@given(grids())
def test_collectors_are_the_first_holders(grid: Grid) -> None:
    owners = collectors_of_stage(units_of(grid), grid, 0)
    assert owners["embedding"] == Owner(0, tuple(range(grid.tp)))
    first = owners["0.0.0.w2"]
    assert first.rank == 0
    ranks = {owner.rank for owner in owners.values()}
    assert ranks == {ep_rank * grid.etp for ep_rank in range(grid.ep)}


def ranks_of(grid: Grid, kind: str, *, of_experts: bool) -> list[tuple[int, ...]]:
    """Oracle: the groups of the rank generator with which Megatron builds its process groups."""
    sizes = {"tp": grid.tp, "ep": 1, "cp": grid.cp}
    if of_experts:
        sizes = {"tp": grid.etp, "ep": grid.ep, "cp": 1}
    dp = grid.world_size // (math.prod(sizes.values()) * grid.pp)
    generator = RankGenerator(**sizes, dp=dp, pp=grid.pp, order="tp-cp-ep-dp-pp", rank_offset=0)
    return [tuple(group) for group in generator.get_ranks(kind)]


@given(grids())
def test_holders_are_megatron_s_tensor_parallel_groups(grid: Grid) -> None:
    holders = [shards for stage in range(grid.pp) for shards in grid.dense_holders(stage)]
    assert sorted(holders) == sorted(ranks_of(grid, "tp", of_experts=False))
    for pipeline in ranks_of(grid, "pp", of_experts=False):
        assert [grid.stage_of(rank) for rank in pipeline] == list(range(grid.pp))


@given(grids())
def test_holders_of_experts_are_megatron_s_expert_parallel_ranks(grid: Grid) -> None:
    expected = set(ranks_of(grid, "tp", of_experts=True))
    for stage in range(grid.pp):
        for ep_rank in range(grid.ep):
            assert expected.issuperset(grid.expert_holders(stage, ep_rank))
    for group in ranks_of(grid, "ep", of_experts=True):
        for ep_rank, rank in enumerate(group):
            holders = grid.expert_holders(grid.stage_of(rank), ep_rank)
            assert any(rank in shards for shards in holders)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fusion", "axis", "stride"),
    [(Fusion.ROWS, 0, 1), (Fusion.QKV, 0, 1), (Fusion.COLUMNS, 1, 1), (Fusion.GATED, 0, 2)],
)
def test_shards_join_as_megatron_s_resharding_planner_says(
    fusion: Fusion, axis: int, stride: int, dtype: torch.dtype
) -> None:
    """Oracle: its plan from the ranks of a copy to one rank with the whole parameter."""
    ranks = [4, 5, 6, 7]
    whole = torch.randn(16, 16).to(dtype)
    shards = {rank: shard(fusion, whole, i, 4) for i, rank in enumerate(ranks)}
    source = metadata_of(shards[4], ranks, axis, stride)
    target = metadata_of(whole, [0], axis, stride)
    copies = _determine_source_ranks_for_dst_param("w", source, target, 0)
    result = torch.zeros_like(whole)
    for rank, from_slice, to_slice in copies:
        result[to_slice] = shards[rank][from_slice]
    assert {rank for rank, _, _ in copies} == set(ranks)
    assert torch.equal(result, join_shards(fusion, list(shards.values())))


def metadata_of(
    tensor: torch.Tensor, ranks: list[int], axis: int, stride: int
) -> ParameterMetadata:
    """Megatron's description of a tensor that some ranks share. stride: segments of a shard."""
    return ParameterMetadata(
        name="w",
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        element_size=tensor.itemsize,
        is_tp=True,
        partition_dim=axis,
        partition_stride=stride,
        owner_rank=ranks[0],
        tensor_parallel_group_ranks=ranks,
    )
