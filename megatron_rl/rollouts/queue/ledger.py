"""The life of every group on rank 0: one table, the legal moves, and the function that moves.

request -> WAITING -> RUNNING -> ARRIVED -> DELIVERED -> GONE
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from megatron_rl.contracts.group import Group
from megatron_rl.rollouts.queue.saved_groups import SavedGroup
from megatron_rl.rollouts.wire.messages import GroupRequest


class GroupState(Enum):
    """State of a group."""

    WAITING = "it waits for a node with room"
    RUNNING = "a collector samples it"
    ABORTING = "its collector is to sample nothing more, and has not answered"
    ARRIVED = "it is complete, and nobody has taken it"
    DELIVERED = "it is taken, and its collector holds the rollouts"
    SAVED = "it is complete, and its rollouts are in a checkpoint"
    GONE = "the ledger does not have it"


_State = GroupState
# The states in which an answer is expected
OPEN_STATES = (_State.WAITING, _State.RUNNING, _State.ABORTING)
_LOADING_STATES = (_State.RUNNING, _State.ABORTING)

LEGAL_MOVES: Mapping[GroupState, Mapping[GroupState, str]] = {
    _State.GONE: {
        _State.WAITING: "it is requested",
        _State.RUNNING: "its collector has begun with it by the rule of the group's probe",
        _State.SAVED: "a resumed run has it in a batch that was sampled before the checkpoint",
    },
    _State.WAITING: {
        _State.RUNNING: "the collector of a node with room gets the request",
        _State.GONE: "nobody needs it any more, and no collector has it",
    },
    _State.RUNNING: {
        _State.WAITING: "its collector is gone or can use no engine: another one samples it",
        _State.ABORTING: "nobody needs it any more, and its tokens are to be counted",
        _State.ARRIVED: "its collector has answered",
        _State.GONE: "nobody needs it any more",
    },
    _State.ABORTING: {
        _State.ARRIVED: "it was complete before its collector could abort it",
        _State.GONE: "its collector has aborted it, or is gone",
    },
    _State.ARRIVED: {
        _State.DELIVERED: "its step takes it",
        _State.GONE: "an evaluation takes it, whose rollouts are not kept, or nobody needs it",
    },
    _State.DELIVERED: {
        _State.GONE: "its rollouts are released",
    },
    _State.SAVED: {
        _State.GONE: "it is released, or requested: a collector then reads its rollouts",
    },
}


@dataclass(eq=False)
class GroupEntry:
    """A group as rank 0 knows it.

    start: what a checkpoint has of it, None for a group that is sampled from its beginning.
    attempt: of the request that was sent last; see `GroupRequest`.
    state: `GroupLedger.move` changes it. number: counts the requests. since: when it was requested,
    on the monotonic clock.
    node, epoch: of the collector that samples it or holds its rollouts.
    demand: its rollouts that have a slot of an engine or wait for one, as far as is known.
    is_submitted: False for the rest of a group that nobody has asked for: its collector has begun
    with it.
    group: the answer, from its arrival on. arrival: counts the answers.
    generated_tokens: tokens that engines are known to have sampled for it. saved_tokens: how many
    of these a checkpoint had.
    """

    request: GroupRequest
    start: SavedGroup | None = None
    attempt: int = 0
    state: GroupState = GroupState.GONE
    number: int = 0
    since: float = field(default_factory=lambda: time.monotonic())
    node: int | None = None
    epoch: int = 0
    demand: int = 0
    is_submitted: bool = True
    group: Group | None = None
    arrival: int = 0
    generated_tokens: int = 0
    saved_tokens: int = 0

    @property
    def id(self) -> str:
        return self.request.group_id

    @property
    def is_open(self) -> bool:
        """True while an answer is expected."""
        return self.state in OPEN_STATES

    def is_with(self, node: int, attempt: int) -> bool:
        """Return True if a collector may answer this request, with this attempt."""
        is_sent = self.state in _LOADING_STATES
        return is_sent and (self.node, self.attempt) == (node, attempt)


class GroupLedger:
    """The groups that were requested and are not released.

    loads: rollouts that need an engine, by node. num_arrived: answers so far, also the number of
    the next one.
    next_attempt: the attempt of new requests. It is larger than in all requests whose answer may
    come late.
    """

    def __init__(self) -> None:
        self._entries: dict[str, GroupEntry] = {}
        # The same, by state and in the order of the moves
        self._by_state: dict[GroupState, dict[str, GroupEntry]] = {s: {} for s in GroupState}
        self._arrivals: dict[int, GroupEntry] = {}  # by the number of their arrival
        self.num_arrived = 0
        self._num_added = 0
        self.loads = Counter[int]()
        self._loads_by_step: dict[int, Counter[int]] = {}  # by node, then by step
        self.next_attempt = 0

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._entries

    def __getitem__(self, group_id: str) -> GroupEntry:
        return self._entries[group_id]

    def find(self, group_ids: Iterable[str]) -> list[GroupEntry]:
        """Return the entries of these groups, as far as there are some."""
        return [self._entries[id_] for id_ in group_ids if id_ in self._entries]

    def in_states(self, *states: GroupState) -> Iterator[GroupEntry]:
        """Yield the entries in these states. The entries must not move meanwhile."""
        for state in states:
            yield from self._by_state[state].values()

    def add(self, entry: GroupEntry, state: GroupState, node: int | None = None) -> None:
        """Add a group. node: of the collector that samples it, if one does.

        Raises RuntimeError if the table has the id already.
        """
        if entry.id in self._entries:
            raise RuntimeError(f"group {entry.id} is there already: please report it")
        self._num_added += 1
        entry.number = self._num_added
        self._entries[entry.id] = entry
        entry.node = node
        self.move(entry, state)

    def move(self, entry: GroupEntry, state: GroupState) -> None:
        """Move a group to another state. Raises RuntimeError for a move that is not legal."""
        if state not in LEGAL_MOVES.get(entry.state, {}):
            raise RuntimeError(
                f"group {entry.id} cannot move from {entry.state.name} to {state.name}: please "
                "report it"
            )
        self._leave(entry, state)
        entry.state = state
        self._enter(entry)

    def assign(self, entry: GroupEntry, node: int) -> None:
        """Move a waiting group to a node's collector."""
        entry.node = node
        self.move(entry, GroupState.RUNNING)

    def set_demand(self, entry: GroupEntry, demand: int) -> None:
        """Set how many rollouts of a group that a collector samples need an engine."""
        assert entry.node is not None
        change = demand - entry.demand
        entry.demand = demand
        self.loads[entry.node] += change
        loads = self._loads_by_step.setdefault(entry.node, Counter())
        loads[entry.request.step] += change
        if not loads[entry.request.step]:
            del loads[entry.request.step]

    def load_up_to(self, node: int, step: int) -> int:
        """Return how many rollouts of a node need an engine before later steps do."""
        loads = self._loads_by_step.get(node, Counter[int]())
        return sum(load for other_step, load in loads.items() if other_step <= step)

    def offer_again(self, entry: GroupEntry) -> None:
        """Let one that waits for groups look at an arrived group again."""
        self._arrivals.pop(entry.arrival)
        self._note_arrival(entry)

    @property
    def first_arrival(self) -> int:
        """The number of the first arrived group, `num_arrived` without one."""
        return next(iter(self._arrivals), self.num_arrived)

    def arrival(self, number: int) -> GroupEntry | None:
        """Return the group that arrived under a number, None if it has moved on."""
        return self._arrivals.get(number)

    def _leave(self, entry: GroupEntry, next_state: GroupState) -> None:
        """Undo what the present state of a group means. next_state: where it goes."""
        self._by_state[entry.state].pop(entry.id, None)
        if entry.state in _LOADING_STATES and next_state not in _LOADING_STATES:
            self.set_demand(entry, 0)
        if entry.is_open and next_state in (GroupState.WAITING, GroupState.GONE):
            # An answer to this attempt may be on its way
            self.next_attempt = max(self.next_attempt, entry.attempt + 1)
        if entry.state is GroupState.ARRIVED:
            del self._arrivals[entry.arrival]
        if entry.state in _LOADING_STATES and next_state is GroupState.WAITING:
            entry.node = None
            entry.attempt += 1

    def _enter(self, entry: GroupEntry) -> None:
        """Do what the new state of a group means."""
        if entry.state is GroupState.GONE:
            del self._entries[entry.id]
            return
        self._by_state[entry.state][entry.id] = entry
        if entry.state is GroupState.RUNNING:
            self.set_demand(entry, _first_demand(entry))
        if entry.state is GroupState.ARRIVED:
            self._note_arrival(entry)

    def _note_arrival(self, entry: GroupEntry) -> None:
        entry.arrival = self.num_arrived
        self._arrivals[entry.arrival] = entry
        self.num_arrived += 1


def _first_demand(entry: GroupEntry) -> int:
    """Return how many rollouts of a group need an engine when a collector gets it."""
    if entry.start is None:
        return entry.request.num_samples
    return len(entry.start.group.open_samples)
