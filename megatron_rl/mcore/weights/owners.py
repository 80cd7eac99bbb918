"""Owners: which rank sends which tensors to the engines.

Pure arithmetic over the sizes of the parallel grid. Every rank computes the same plan of its
pipeline stage by itself.

Megatron-Core's own planner (`megatron.core.resharding`) plans copies between two Megatron models,
from the receiver's side. It chooses among replicas by the receiver's rank, not by bytes. Engines
are no ranks of its world. So it is the oracle of the shards and their order, not the planner
(`tests/mcore/test_owners.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Each owner has a communicator with each engine.
MAX_OWNERS = 8


@dataclass(frozen=True)
class Owner:
    """The rank that sends a unit, and the ranks whose shards it gathers, itself among them."""

    rank: int
    shards: tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """Tensors that an engine fuses, and that therefore travel in one update.

    key: unique in the pipeline stage. num_bytes: of the whole tensors. ep_rank: the expert-parallel
    rank that holds them, None outside experts.
    """

    key: str
    num_bytes: int
    ep_rank: int | None = None


@dataclass(frozen=True)
class Grid:
    """The sizes of the parallel grid.

    Ranks count up in Megatron's order: outside experts over tp, cp, dp and pp, the first fastest;
    within experts over etp, ep, their own dp and pp.
    """

    world_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def stage_size(self) -> int:
        """The number of ranks of a pipeline stage."""
        return self.world_size // self.pp

    def stage_of(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // self.stage_size

    def dense_holders(self, stage: int) -> list[tuple[int, ...]]:
        """The copies of the parameters outside experts, each as the ranks of its shards."""
        return self._groups_of(stage, self.tp)

    def expert_holders(self, stage: int, ep_rank: int) -> list[tuple[int, ...]]:
        """The copies of the experts of one expert-parallel rank."""
        return self._groups_of(stage, self.etp)[ep_rank :: self.ep]

    def _groups_of(self, stage: int, size: int) -> list[tuple[int, ...]]:
        first = stage * self.stage_size
        starts = range(first, first + self.stage_size, size)
        return [tuple(range(start, start + size)) for start in starts]


def owners_of_stage(
    units: Iterable[Unit], grid: Grid, stage: int, *, max_owners: int = MAX_OWNERS
) -> dict[str, Owner]:
    """Choose the owner of every unit of a pipeline stage, by key.

    Experts are never gathered over expert parallelism, so each expert-parallel rank has an owner.
    Beyond that, at most `max_owners` ranks own anything. Bytes are balanced: the largest units come
    first, each to the candidate with the fewest bytes. Experts come before the rest, because they
    have fewer candidates.

    Raises ValueError if two units have the same key.
    """
    candidates = _candidates(grid, stage, max_owners)
    dense_shards = {r: shards for shards in grid.dense_holders(stage) for r in shards}
    loads = dict.fromkeys(dense_shards, 0)
    owners: dict[str, Owner] = {}
    for unit in sorted(units, key=_turn_of):
        if unit.key in owners:
            raise ValueError(f"unit {unit.key}: twice in pipeline stage {stage}")
        if unit.ep_rank is None:
            choices = [r for ranks in candidates for r in ranks]
            shards_of: Mapping[int, tuple[int, ...]] = dense_shards
        else:
            choices = candidates[unit.ep_rank]
            shards_of = {
                r: shards for shards in grid.expert_holders(stage, unit.ep_rank) for r in shards
            }
        rank = min(choices, key=lambda r: (loads[r], r))
        loads[rank] += unit.num_bytes
        owners[unit.key] = Owner(rank, shards_of[rank])
    return owners


def count_owners(grid: Grid, *, max_owners: int = MAX_OWNERS) -> int:
    """Return the number of ranks of all stages that `owners_of_stage` may choose."""
    ranks = {rank for ranks in _candidates(grid, 0, max_owners) for rank in ranks}
    return grid.pp * len(ranks)


def collectors_of_stage(units: Iterable[Unit], grid: Grid, stage: int) -> dict[str, Owner]:
    """Choose one rank of the stage, and one for each expert-parallel rank, without balance.

    A rank thus sends all its experts in their order.
    """
    owners = {}
    for unit in units:
        if unit.ep_rank is None:
            shards = grid.dense_holders(stage)[0]
        else:
            shards = grid.expert_holders(stage, unit.ep_rank)[0]
        owners[unit.key] = Owner(shards[0], shards)
    return owners


def _turn_of(unit: Unit) -> tuple[bool, int, str]:
    return unit.ep_rank is None, -unit.num_bytes, unit.key


def _candidates(grid: Grid, stage: int, max_owners: int) -> list[list[int]]:
    """The ranks that may own something, by expert-parallel rank, spread over the stage's nodes."""
    count = max(1, max_owners // grid.ep)
    candidates = []
    for ep_rank in range(grid.ep):
        ranks = [r for shards in grid.expert_holders(stage, ep_rank) for r in shards]
        size = min(count, len(ranks))
        candidates.append([ranks[i * len(ranks) // size] for i in range(size)])
    return candidates
