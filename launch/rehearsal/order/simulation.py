"""Lets all ranks of a grid progress together, and names what they would wait for without end.

Every operation begins when it is the first of its channel on each of its ranks, and ends when all
of them have begun it. A channel is what NCCL executes in order: the collectives and batched
messages of one group, or the single messages between two ranks of one group. If all ranks reach
their ends under this rule, one global order of all operations exists that agrees with the order on
every rank. No mix of streams can then deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from launch.rehearsal.order.grid import Grid, Program
from launch.rehearsal.order.trace import ANNOUNCED, SEND, WORLD, Operation

_Channel = tuple[int, int]
_GROUP = -1
_MAX_WAITERS = 6


class OrderFault(Exception):
    """Operations of several ranks do not meet, or a rank waits without end."""


@dataclass
class _Meeting:
    """One collective, or one message, with the ranks that have begun it."""

    operation: Operation
    rank: int
    number: int
    participants: list[tuple[int, int]] = field(default_factory=list)


class _RankState:
    """Progress of one rank.

    position: of the next event. num_starts: the number of operations that began. ended_numbers:
    those that ended and were not waited for yet. channels: items that have not ended, each one
    operation or a batch. counters: how many operations of a group, or messages between two ranks,
    began. groups: this rank's own group for an index of the representative. open_parts: by the
    first number of an item, its operations that have not ended.
    """

    __slots__ = (
        "channels",
        "counters",
        "ended_numbers",
        "groups",
        "num_starts",
        "open_parts",
        "position",
    )

    def __init__(self) -> None:
        self.position = 0
        self.num_starts = 0
        self.ended_numbers: set[int] = set()
        self.channels: dict[_Channel, deque[tuple[tuple[int, Operation], ...]]] = {}
        self.counters: dict[tuple[int, int], int] = {}
        self.groups: dict[int, int] = {}
        self.open_parts: dict[int, int] = {}


class Simulation:
    """All ranks of a grid with their programs.

    programs: of each rank, in order. Ranks of one class may share one.
    """

    def __init__(self, grid: Grid, programs: Sequence[Program]) -> None:
        self._grid = grid
        self._programs = programs
        self._ranks = [_RankState() for _ in programs]
        self._meetings: dict[tuple[int, int, int, int], _Meeting] = {}
        self._ready = deque(range(len(programs)))
        self._is_ready = [True] * len(programs)
        self.operations = 0

    def run(self) -> None:
        """Run all ranks to their ends. Raises `OrderFault`."""
        while self._ready:
            rank = self._ready.popleft()
            self._is_ready[rank] = False
            self._advance(rank)
        self._require_end()

    def _advance(self, rank: int) -> None:
        state = self._ranks[rank]
        program = self._programs[rank]
        events = program.events
        operations = program.operations
        count = len(events)
        while state.position < count:
            event = events[state.position]
            if event < 0:
                if -event not in state.ended_numbers:
                    return
                state.ended_numbers.discard(-event)
                state.position += 1
                continue
            state.position += 1
            state.num_starts += 1
            operation = operations[event]
            item = [(state.num_starts, operation)]
            while operation.batch and state.position < count:
                following = events[state.position]
                if following < 0 or operations[following].batch != operation.batch:
                    break
                state.position += 1
                state.num_starts += 1
                item.append((state.num_starts, operations[following]))
            self._enqueue(rank, state, tuple(item))

    def _enqueue(
        self, rank: int, state: _RankState, item: tuple[tuple[int, Operation], ...]
    ) -> None:
        operation = item[0][1]
        channel = self._channel(rank, state, operation)
        queue = state.channels.setdefault(channel, deque())
        queue.append(item)
        if len(queue) == 1:
            self._begin(rank, state, channel, item)

    def _channel(self, rank: int, state: _RankState, operation: Operation) -> _Channel:
        group = self._group(rank, state, operation.group)
        if operation.is_message and not operation.batch:
            return group, self._peer(rank, operation, group)
        return group, _GROUP

    def _group(self, rank: int, state: _RankState, index: int) -> int:
        group = state.groups.get(index)
        if group is None:
            group = state.groups[index] = self._grid.group_of(rank, index)
        return group

    def _peer(self, rank: int, operation: Operation, group: int) -> int:
        if operation.peer_in_pipeline:
            return self._grid.pipeline(rank)[operation.peer]
        return self._grid.groups[group].ranks[operation.peer]

    def _begin(
        self,
        rank: int,
        state: _RankState,
        channel: _Channel,
        item: tuple[tuple[int, Operation], ...],
    ) -> None:
        """Begin the first item of a channel, and end what all ranks have begun."""
        state.open_parts[item[0][0]] = len(item)
        for number, operation in item:
            self.operations += 1
            self._meet(rank, state, channel[0], number, operation)

    def _meet(
        self, rank: int, state: _RankState, group: int, number: int, operation: Operation
    ) -> None:
        if operation.is_message:
            peer = self._peer(rank, operation, group)
            sender, receiver = (rank, peer) if operation.name == SEND else (peer, rank)
            counter = (group, sender * len(self._ranks) + receiver)
            size = 2
        else:
            sender = receiver = _GROUP
            counter = (group, _GROUP)
            size = len(self._grid.groups[group].ranks)
        turn = state.counters.get(counter, 0)
        state.counters[counter] = turn + 1
        key = (group, sender, receiver, turn)
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = _Meeting(operation, rank, number)
        elif not _agree(meeting.operation, operation):
            raise OrderFault(self._describe_mismatch(meeting, rank, number, operation))
        meeting.participants.append((rank, number))
        if len(meeting.participants) == size:
            del self._meetings[key]
            for participant, its_number in meeting.participants:
                self._end(participant, its_number)

    def _end(self, rank: int, number: int) -> None:
        """End an operation on one rank, and begin the next of its channel."""
        state = self._ranks[rank]
        state.ended_numbers.add(number)
        channel = _channel_of(state, number)
        queue = state.channels[channel]
        item = queue[0]
        state.open_parts[item[0][0]] -= 1
        if not state.open_parts[item[0][0]]:
            del state.open_parts[item[0][0]]
            queue.popleft()
            if queue:
                self._begin(rank, state, channel, queue[0])
        if not self._is_ready[rank]:
            self._is_ready[rank] = True
            self._ready.append(rank)

    def _require_end(self) -> None:
        waiting = [rank for rank in range(len(self._ranks)) if self._blocking(rank) is not None]
        if waiting:
            raise OrderFault(self._describe_deadlock(waiting))
        if self._meetings:
            meeting = next(iter(self._meetings.values()))
            raise OrderFault(
                f"{self._describe(meeting.rank, meeting.number, meeting.operation)} never ends: "
                f"{self._describe_absent(meeting)}"
            )

    def _blocking(self, rank: int) -> tuple[int, Operation] | None:
        """The operation whose end a rank waits for."""
        state = self._ranks[rank]
        events = self._programs[rank].events
        if state.position >= len(events):
            return None
        number = -events[state.position]
        return number, self._operation(rank, number)

    def _operation(self, rank: int, number: int) -> Operation:
        program = self._programs[rank]
        num_starts = 0
        for event in program.events:
            num_starts += event >= 0
            if num_starts == number:
                return program.operations[event]
        raise AssertionError("a wait for an operation that did not start")

    def _describe(self, rank: int, number: int, operation: Operation) -> str:
        program = self._programs[rank]
        group = self._grid.group_of(rank, operation.group)
        size = "" if operation.num_bytes == ANNOUNCED else f", {operation.num_bytes} bytes"
        detail = f" of {operation.dtype}{size}" if operation.dtype else ""
        if operation.is_message:
            word = "to" if operation.name == SEND else "from"
            detail += f" {word} rank {self._peer(rank, operation, group)}"
        elif operation.root >= 0 and group != WORLD:
            detail += f" with root {operation.root}"
        elif operation.root >= 0:
            detail += f" with root or group {operation.root}"
        place = f" ({operation.place})" if operation.place else ""
        return (
            f"rank {rank}, phase {program.phase_at(self._event_of(rank, number))!r}, operation "
            f"{number}: {operation.name.strip('_')}{detail} in {self._grid.describe(group)}{place}"
        )

    def _event_of(self, rank: int, number: int) -> int:
        num_starts = 0
        for position, event in enumerate(self._programs[rank].events):
            num_starts += event >= 0
            if num_starts == number:
                return position
        return 0

    def _describe_mismatch(
        self, meeting: _Meeting, rank: int, number: int, operation: Operation
    ) -> str:
        earlier = meeting.participants[:_MAX_WAITERS]
        others = ", ".join(str(other) for other, _ in earlier)
        return (
            f"operations differ. {self._describe(rank, number, operation)}; but "
            f"{self._describe(meeting.rank, meeting.number, meeting.operation)}, as rank(s) "
            f"{others} did"
        )

    def _describe_deadlock(self, waiting: Sequence[int]) -> str:
        """Follow who waits for whom until a rank appears again, or has ended."""
        chain: list[int] = []
        rank = waiting[0]
        lines = []
        while rank not in chain:
            chain.append(rank)
            blocking = self._blocking(rank)
            if blocking is None:
                lines.append(f"rank {rank} has ended")
                break
            lines.append(f"{self._describe(rank, *blocking)} waits for")
            rank = self._absent_rank(rank, *blocking)
        else:
            lines.append(f"rank {rank}, which waits as above")
        return f"{len(waiting)} ranks wait without end. " + "; ".join(lines)

    def _absent_rank(self, rank: int, number: int, operation: Operation) -> int:
        """A rank that has not begun an operation that this rank waits for."""
        for meeting in self._meetings.values():
            if (rank, number) in meeting.participants:
                return self._absent(meeting)[0]
        # Not begun here either: an earlier operation of the channel has not ended
        queue = self._ranks[rank].channels[self._channel(rank, self._ranks[rank], operation)]
        first_number, _ = queue[0][0]
        for meeting in self._meetings.values():
            if (rank, first_number) in meeting.participants:
                return self._absent(meeting)[0]
        return rank

    def _absent(self, meeting: _Meeting) -> list[int]:
        rank = meeting.rank
        group = self._grid.group_of(rank, meeting.operation.group)
        if meeting.operation.is_message:
            return [self._peer(rank, meeting.operation, group)]
        present = {participant for participant, _ in meeting.participants}
        return [member for member in self._grid.groups[group].ranks if member not in present]

    def _describe_absent(self, meeting: _Meeting) -> str:
        absent = self._absent(meeting)
        names = ", ".join(map(str, absent[:_MAX_WAITERS]))
        return f"rank(s) {names} of {len(absent)} never begin it"


def _channel_of(state: _RankState, number: int) -> _Channel:
    """The channel whose first item holds an operation."""
    for channel, queue in state.channels.items():
        if queue and queue[0][0][0] <= number <= queue[0][-1][0]:
            return channel
    raise AssertionError("an operation ended that no channel holds")


def _agree(first: Operation, second: Operation) -> bool:
    """True if two ranks mean the same collective, or the two ends of one message."""
    if first.is_message != second.is_message:
        return False
    if not first.is_message and (first.name, first.root) != (second.name, second.root):
        return False
    same_bytes = (
        ANNOUNCED in (first.num_bytes, second.num_bytes) or first.num_bytes == second.num_bytes
    )
    return first.dtype == second.dtype and same_bytes
