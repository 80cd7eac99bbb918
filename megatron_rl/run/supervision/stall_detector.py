"""Finds the rank that all others wait for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_rl.run.supervision.rank_sample import RankSample

_MAX_RANKS = 3  # with their stacks, in one message
_MAX_CALLS = 12  # of a stack in a message


@dataclass
class _Observation:
    """The last sample of a rank, and since when its place and its count have not changed."""

    sample: RankSample
    unchanged_since: float
    silent_since: float


class StallDetector:
    """Compares the samples of all ranks while rank 0 executes a command.

    A stall is a command in which no rank moves. Its cause is a rank that does not wait for others:
    its stack stays the same, or it takes no samples any more.

    world_size: the number of ranks. seconds: how long nothing must move.
    """

    def __init__(self, world_size: int, seconds: float) -> None:
        self._world_size = world_size
        self._seconds = seconds
        self._observations: dict[int, _Observation] = {}

    def observe(self, samples: Mapping[int, RankSample], now: float) -> None:
        """Add the newest sample of each rank.

        now: monotonic seconds of this process, because the ranks' clocks differ.
        """
        for rank, sample in samples.items():
            previous = self._observations.get(rank)
            if previous is None:
                self._observations[rank] = _Observation(sample, now, now)
                continue
            is_new = sample.count != previous.sample.count
            has_moved = _place(sample) != _place(previous.sample)
            self._observations[rank] = _Observation(
                sample,
                unchanged_since=now if has_moved else previous.unchanged_since,
                silent_since=now if is_new else previous.silent_since,
            )

    def describe_stall(self, now: float) -> str:
        """Return who waits for whom, with stacks; "" if some rank moves."""
        if len(self._observations) < self._world_size:
            return ""
        if any(self._is_moving(observation, now) for observation in self._observations.values()):
            return ""
        causes = self._causes(now)
        if causes:
            return "\n".join(self._lines_of_causes(sorted(causes), now))
        return "\n".join(self._lines_of_places())

    def _causes(self, now: float) -> list[int]:
        observations = self._observations
        silent_ranks = [r for r, o in observations.items() if self._is_silent(o, now)]
        if silent_ranks:
            return silent_ranks
        working_ranks = [r for r, o in observations.items() if not o.sample.is_waiting]
        if len(working_ranks) < self._world_size:
            return working_ranks
        return self._ranks_apart()

    def _is_moving(self, observation: _Observation, now: float) -> bool:
        if self._is_silent(observation, now):
            return False
        return now - observation.unchanged_since < self._seconds

    def _is_silent(self, observation: _Observation, now: float) -> bool:
        return now - observation.silent_since >= self._seconds

    def _ranks_by_place(self) -> dict[tuple[int, tuple[str, ...]], list[int]]:
        ranks_by_place: dict[tuple[int, tuple[str, ...]], list[int]] = defaultdict(list)
        for rank, observation in self._observations.items():
            ranks_by_place[_place(observation.sample)].append(rank)
        return ranks_by_place

    def _ranks_apart(self) -> list[int]:
        """The ranks that are elsewhere than most. Empty if there is no majority.

        On GPUs a rank waits where it needs a result of the device, and not in the collective.
        """
        groups = sorted(self._ranks_by_place().values(), key=len)
        if 2 * len(groups[-1]) <= self._world_size:
            return []
        return [rank for group in groups[:-1] for rank in group]

    def _lines_of_causes(self, causes: list[int], now: float) -> Iterator[str]:
        num_waiting = self._world_size - len(causes)
        others = "the other rank waits" if num_waiting == 1 else f"{num_waiting} other ranks wait"
        for rank in causes[:_MAX_RANKS]:
            observation = self._observations[rank]
            if self._is_silent(observation, now):
                seconds = now - observation.silent_since
                state = f"has not responded for {seconds:.0f} s. Its last known place:"
            else:
                seconds = now - observation.unchanged_since
                state = f"has been at the same place for {seconds:.0f} s:"
            yield f"rank {rank} ({observation.sample.command or 'no command'}) {state}"
            yield from _lines_of_stack(observation.sample)
        if len(causes) > _MAX_RANKS:
            yield f"{len(causes) - _MAX_RANKS} more ranks are like that"
        if num_waiting:
            yield f"{others} for {'it' if len(causes) == 1 else 'them'}"

    def _lines_of_places(self) -> Iterator[str]:
        """Describe ranks at several places, if no place stands out."""
        ranks_by_place = self._ranks_by_place()
        if len(ranks_by_place) < 2:
            return
        yield "no rank moves, and the ranks are at several places:"
        for (_, stack), ranks in list(ranks_by_place.items())[:_MAX_RANKS]:
            names = ", ".join(map(str, sorted(ranks)[:8]))
            rest = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
            yield f"rank {names}{rest} at"
            yield from _lines_of_stack(RankSample(count=0, stack=stack))


def _place(sample: RankSample) -> tuple[int, tuple[str, ...]]:
    return sample.number, sample.stack


def _lines_of_stack(sample: RankSample) -> Iterator[str]:
    for call in sample.stack[-_MAX_CALLS:]:
        yield f"    {call}"
