"""Maps what representatives of a grid recorded to all of its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.rehearsal.cuda_guard import RehearsalUnavailable
from launch.rehearsal.order.trace import PIPELINE_GROUP, WORLD, Group, Operation, Trace

_DATA_PARALLEL_GROUP = "DATA_PARALLEL_GROUP"


@dataclass(frozen=True)
class Program:
    """The events of one rank, in order; see `Phase`.

    operations: of the representative. phases: names, by the index of the event that begins them.
    representative: the rank that was rehearsed.
    """

    operations: Sequence[Operation]
    events: Sequence[int]
    phases: Mapping[int, str]
    representative: int

    def phase_at(self, position: int) -> str:
        """The phase of an event."""
        starts = [start for start in self.phases if start <= position]
        return self.phases[max(starts)] if starts else ""


class Grid:
    """The groups of all ranks of a job.

    groups: in the order of creation, as every rank must create them. Groups of one name without
    common ranks are one family: what a representative does in its group of a family, another rank
    of its class does in its own group of that family.
    """

    def __init__(self, groups: Sequence[Group], world_size: int) -> None:
        self.groups = tuple(groups)
        self.world_size = world_size
        self._families = _families(groups)
        self._members: dict[int, dict[int, int]] = {}
        for index, family in enumerate(self._families):
            members = self._members.setdefault(family, {})
            for rank in groups[index].ranks:
                members[rank] = index
        self._pipelines = self._groups_of_ranks(PIPELINE_GROUP)
        self._replicas = self._groups_of_ranks(_DATA_PARALLEL_GROUP)

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return self._pipelines[rank].index(rank)

    def replica(self, rank: int) -> int:
        """The data-parallel rank of a rank."""
        return self._replicas[rank].index(rank)

    def pipeline(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the other layers of this rank's replica."""
        return self._pipelines[rank]

    def class_of(self, rank: int) -> tuple[int, bool]:
        """The stage of a rank, and whether it exports to rank 0. They decide its sequence."""
        return self.stage(rank), self._pipelines[rank][0] == 0

    def representatives(self) -> dict[tuple[int, bool], int]:
        """The last rank of each class.

        It is not the first of its groups, so that another position pattern would be noticed.
        """
        return {self.class_of(rank): rank for rank in range(self.world_size)}

    def group_of(self, rank: int, index: int) -> int:
        """A rank's group of the family of a representative's group."""
        if index == WORLD:
            return WORLD
        members = self._members[self._families[index]]
        if rank not in members:
            raise RehearsalUnavailable(
                f"rank {rank} has no group like {self.describe(index)}. Rehearse it by itself"
            )
        return members[rank]

    def describe(self, index: int) -> str:
        """Name a group and its ranks."""
        group = self.groups[index]
        size = len(group.ranks)
        members = ", ".join(map(str, group.ranks[:8])) + (", …" if size > 8 else "")
        return f"{group.name or 'unnamed group ' + str(index)} of {size} ({members})"

    def _groups_of_ranks(self, name: str) -> dict[int, tuple[int, ...]]:
        return {
            rank: group.ranks for group in self.groups if group.name == name for rank in group.ranks
        }


def _families(groups: Sequence[Group]) -> list[int]:
    """Number the families. A name whose groups share ranks makes several."""
    generations: Counter[tuple[str, int]] = Counter()
    numbers: dict[tuple[str, int], int] = {}
    families = []
    for index, group in enumerate(groups):
        name = group.name or f"unnamed {index}"
        generation = max(generations[name, rank] for rank in group.ranks)
        for rank in group.ranks:
            generations[name, rank] = generation + 1
        families.append(numbers.setdefault((name, generation), len(numbers)))
    return families


def require_equal_groups(traces: Sequence[Trace]) -> Grid:
    """Return the grid of all ranks. Raises `RehearsalUnavailable` if two disagree about a group."""
    first = traces[0]
    for trace in traces[1:]:
        for index, (mine, other) in enumerate(zip(first.groups, trace.groups, strict=False)):
            if mine != other:
                raise RehearsalUnavailable(
                    f"ranks {first.rank} and {trace.rank} create different groups: their group "
                    f"{index} is {mine} and {other}. All ranks must create all groups in one order"
                )
        if len(first.groups) != len(trace.groups):
            raise RehearsalUnavailable(
                f"rank {first.rank} creates {len(first.groups)} groups and rank {trace.rank} "
                f"{len(trace.groups)}. All ranks must create all groups"
            )
    return Grid(first.groups, first.world_size)


def flatten(trace: Trace, leave_out: frozenset[str] = frozenset()) -> Program:
    """Join the phases of a trace, without some of them."""
    events: list[int] = []
    phases: dict[int, str] = {}
    num_starts = 0
    for phase in trace.phases:
        if phase.name in leave_out:
            continue
        phases[len(events)] = phase.name
        events += [event if event >= 0 else event - num_starts for event in phase.events]
        num_starts += sum(event >= 0 for event in phase.events)
    return Program(trace.operations, events, phases, trace.rank)
