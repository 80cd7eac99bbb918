"""Checks the traces of a grid's ranks, or of one rank of each class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.rehearsal.cuda_guard import RehearsalUnavailable
from launch.rehearsal.order.grid import Grid, Program, flatten, require_equal_groups
from launch.rehearsal.order.phases import WITH_ROLLOUTS, WITHOUT_ROLLOUTS
from launch.rehearsal.order.simulation import Simulation
from launch.rehearsal.order.trace import Trace


@dataclass(frozen=True)
class OrderResult:
    """The result of a check. counts: operations of all ranks by phase."""

    operations: int
    groups: int
    counts: Mapping[str, int]


def check_order(traces: Sequence[Trace]) -> OrderResult:
    """Let all ranks progress together.

    traces: of at least one rank of each class. A rank without a trace of its own uses its class's.
    Raises `OrderFault` for operations that do not meet and for a deadlock, and
    `RehearsalUnavailable` for a class without a trace.
    """
    grid = require_equal_groups(traces)
    programs = programs_of_ranks(grid, traces)
    simulation = Simulation(grid, programs)
    simulation.run()
    return OrderResult(simulation.operations, len(grid.groups), _count(programs))


def programs_of_ranks(grid: Grid, traces: Sequence[Trace]) -> list[Program]:
    """The program of each rank: its own trace, or the trace of its class."""
    trace_of_rank = {trace.rank: trace for trace in traces}
    of_class = {grid.class_of(trace.rank): trace for trace in traces}
    programs: dict[tuple[int, bool], Program] = {}
    result = []
    for rank in range(grid.world_size):
        trace = trace_of_rank.get(rank) or of_class.get(grid.class_of(rank))
        if trace is None:
            stage, exports = grid.class_of(rank)
            raise RehearsalUnavailable(
                f"no rank like rank {rank} was rehearsed: stage {stage}, "
                f"{'in' if exports else 'outside'} the pipeline of rank 0"
            )
        has_rollouts = _has_rollouts(grid, rank)
        key = (trace.rank, has_rollouts)
        if key not in programs:
            other_variant = WITHOUT_ROLLOUTS if has_rollouts else WITH_ROLLOUTS
            programs[key] = flatten(trace, frozenset({other_variant}))
        result.append(programs[key])
    return result


def _has_rollouts(grid: Grid, rank: int) -> bool:
    """True for the half of the replicas that get rollouts in the uneven step."""
    replicas = 1 + max(grid.replica(other) for other in range(grid.world_size))
    return grid.replica(rank) < -(-replicas // 2)


def _count(programs: Sequence[Program]) -> dict[str, int]:
    uses = Counter(id(program) for program in programs)
    distinct = {id(program): program for program in programs}
    counts: Counter[str] = Counter()
    for key, program in distinct.items():
        starts = sorted(program.phases)
        for start, end in zip(starts, [*starts[1:], len(program.events)], strict=True):
            number = sum(event >= 0 for event in program.events[start:end])
            counts[program.phases[start]] += uses[key] * number
    return dict(counts)
