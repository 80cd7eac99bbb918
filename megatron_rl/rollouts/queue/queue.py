"""Queue of rank 0: requests for groups go in, complete groups come out.

A group is delivered once. If a collector ends, its requests go to other collectors, or to the one
that replaces it, under the same ids and with the same seeds.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import msgspec

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import NEVER_SENT, STALE, Group, RolloutRef
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.credit.group_kinds import kind_of
from megatron_rl.rollouts.queue.answers import IdleEngines, PauseAnswers, StoredGroups
from megatron_rl.rollouts.queue.collectors import Collectors
from megatron_rl.rollouts.queue.engine_roster import EngineRoster
from megatron_rl.rollouts.queue.hub import CollectorConnected, CollectorGone, CollectorHub, Event
from megatron_rl.rollouts.queue.ledger import OPEN_STATES, GroupEntry, GroupLedger, GroupState
from megatron_rl.rollouts.queue.saved_groups import NOTHING_SAVED, SavedGroup, SavedGroups
from megatron_rl.rollouts.queue.waiting import Wait, never
from megatron_rl.rollouts.wire.messages import (
    AbortRequests,
    Alive,
    Configure,
    Drop,
    Dropped,
    EngineLeftOut,
    GroupDone,
    GroupRequest,
    Partial,
    Priority,
    Problem,
    Served,
    Store,
    partial_name,
)
from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError

# An engine answers an abort with its next step. A longer wait would cost more than the surplus.
_ABORT_SECONDS = 30.0
# An engine takes one abort of one request at a time, so that others are on their way meanwhile.
_ABORT_THREADS = 8


class CollectorFailed(Failure):
    """A collector reported a problem that ends the run, or sent an unexpected message.

    exit_code: `REFUSED` if a user-defined class cannot be opened.
    """

    exit_code = ExitCode.ENGINE_FAILED


class HoldTimedOut(Failure):
    """Requests did not stop in time."""

    exit_code = ExitCode.ENGINE_FAILED


class RolloutQueue:
    """Distributes group requests over the collectors of all nodes.

    Each request goes to a node whose engines have room for it, and the smallest load for each of
    their ranks. It waits here while there is none, in its place among the others. `send_waiting`
    sends all of them at once. If the last engine of a node leaves, its collector continues its
    responses on engines of other nodes.

    num_repeated: requests that were sent again, because their collector was gone, or because what a
    checkpoint had of them did not fit.
    on_engine_failure: learns the URL of an engine that failed, and why.
    on_lost_collector: learns the node and the epoch of a collector that is gone, and why.
    on_arrival: gets the answer to each request, and the seconds since it was submitted.
    expected_tokens: returns how many tokens a rollout of a prompt probably has, 0 if that is not
    known. Asked for each request that does not say it.
    abort: aborts a request, given an engine's URL and the request id. None: expired requests are
    not aborted. abort_seconds: how long `RolloutQueue.abort` waits for engines.
    log: writes a line for the user.
    """

    def __init__(
        self,
        hub: CollectorHub,
        settings: RolloutSettings,
        *,
        abort: Callable[[str, str], None] | None = None,
        abort_seconds: float = _ABORT_SECONDS,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._hub = hub
        self._abort = abort
        self._abort_seconds = abort_seconds
        self._log = log
        self.on_engine_failure: Callable[[str, str], None] | None = None
        self.on_lost_collector: Callable[[int, int, str], None] | None = None
        self.on_arrival: Callable[[GroupDone, float], None] | None = None
        self.expected_tokens: Callable[[Prompt], int] | None = None
        self._orders_by_length = settings.order == "longest"
        self._max_staleness = settings.max_staleness
        self._version = 0
        self._roster = EngineRoster()
        self._collectors = Collectors(hub, self._roster)
        self._ledger = GroupLedger()
        self._pause = PauseAnswers()
        self._stored_groups = StoredGroups()
        self._saved_groups = NOTHING_SAVED
        self._own_stored_ids: tuple[str, ...] = ()  # of groups that this process has stored
        self._idle_engines = IdleEngines()
        self.num_repeated = 0

    # What collectors shall do

    def configure(self, configurations: Mapping[int, Configure]) -> None:
        """Set the configuration of each node's collector, also for later connections."""
        self._collectors.configure(configurations)
        self._handle_events()

    def set_engines(self, engines: Sequence[Engine]) -> None:
        """Set the engines that collectors may use. All hold the current weights.

        An engine that was started again is missing in one call before.
        """
        self._roster.set_engines(engines)
        self._collectors.send_state()
        self._move_stuck_requests()
        self._send_requests()

    def set_version(self, version: int) -> None:
        """Set the version of the trainer's weights, which the engines hold now."""
        if version != self._version:
            self._roster.forget_failures()
        self._version = version
        self._collectors.set_version(version)

    def disconnect_before(self, node: int, epoch: int, reason: str) -> None:
        """Deliver nothing more of a collector of an earlier epoch: its process has ended."""
        connected_epoch = self._collectors.epochs.get(node)
        if connected_epoch is not None and connected_epoch < epoch:
            self._hub.disconnect(node, connected_epoch, reason)

    @property
    def connected_nodes(self) -> list[int]:
        """The nodes whose collectors are connected and configured."""
        return self._collectors.connected_nodes

    @property
    def engines_left_out(self) -> frozenset[str]:
        """The URLs of engines that collectors do not use, because they failed."""
        return frozenset(self._roster.left_out)

    def stop(self) -> None:
        """End every collector."""
        self._collectors.stop()

    # Groups

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Request groups. The rest of a group is not sent again if a collector has begun with it.

        Raises ValueError for a group id that is open, or delivered and not released, and for the
        rest of a group that is not what its rule says. Raises `CollectorFailed`.
        """
        self._handle_events()
        for request in requests:
            if request.group_id not in self._ledger:
                self._add(request, self._saved_groups.take(request))
                continue
            entry = self._ledger[request.group_id]
            if entry.is_submitted:
                raise ValueError(
                    f"group {request.group_id} was submitted already: a group is delivered once"
                )
            _require_same(entry.request, request)
            entry.is_submitted = True
            if entry.state is GroupState.ARRIVED:
                self._ledger.offer_again(entry)
        self._send_requests()
        self.num_repeated += self._saved_groups.count_misfits()

    def _add(self, request: GroupRequest, start: SavedGroup | None) -> None:
        """Let a request wait for a collector. start: what a checkpoint has of the group."""
        if start is not None and start.is_finished:
            # Its rest may be in the checkpoint, too: nobody begins with it before it is requested
            request = msgspec.structs.replace(request, extension=None)
        entry = GroupEntry(self._in_place(request), start, self._ledger.next_attempt)
        self._ledger.add(entry, GroupState.WAITING)

    def _in_place(self, request: GroupRequest) -> GroupRequest:
        """Return a request with what decides its place: nothing with rollout.order=submission."""
        if not self._orders_by_length:
            return msgspec.structs.replace(request, step=0, expected_tokens=0)
        if request.expected_tokens or self.expected_tokens is None:
            return request
        expected_tokens = min(self.expected_tokens(request.prompt), request.sampling.max_new_tokens)
        return msgspec.structs.replace(request, expected_tokens=expected_tokens)

    def restore(self, groups: SavedGroups) -> None:
        """Continue the groups of a checkpoint once they are submitted, instead of new ones."""
        self._saved_groups = groups

    def drop_saved(self) -> int:
        """Drop the groups of a checkpoint that no request asked for. Returns their tokens."""
        return self._saved_groups.drop()

    def hold_saved(self, groups: Iterable[SavedGroup], sampling: Sampling, group_size: int) -> None:
        """Count finished groups of a checkpoint as delivered and lost, so that they can be read.

        sampling, group_size: of groups that are sampled anew, because their collector is lost
        later. These are whole groups, also where the checkpoint has a probe.
        """
        for start in groups:
            request = GroupRequest(
                group_id=start.group.group_id,
                prompt=start.group.prompt,
                num_samples=group_size,
                sampling=sampling,
            )
            entry = GroupEntry(request, start)
            entry.generated_tokens = entry.saved_tokens = start.num_tokens
            self._ledger.add(entry, GroupState.SAVED)

    def as_completed(
        self,
        idle: Callable[[], None],
        *,
        is_wanted: Callable[[str], bool] | None = None,
        idle_every_seconds: float = 1.0,
    ) -> Iterator[Group]:
        """Yield groups until none is open. Call `idle` about every `idle_every_seconds`.

        is_wanted: whether to yield the group of an id. Others wait for another call. None: yield
        all.
        A long wait is logged at growing intervals. It ends, because collectors limit the time of
        every response (`EnginePool`), environment and scorer, and `idle` limits the time without
        engines or collectors. Raises `CollectorFailed`, and what `idle` raises.
        """
        ledger = self._ledger
        num_arrived_before = ledger.num_arrived
        number = ledger.first_arrival

        def is_over() -> bool:
            open_ids = (entry.id for entry in ledger.in_states(*OPEN_STATES))
            return not any(is_wanted is None or is_wanted(id_) for id_ in open_ids)

        def has_to_look() -> bool:
            return number < ledger.num_arrived or is_over()

        def describe(seconds: float) -> str:
            return self._describe_wait(ledger.num_arrived - num_arrived_before, seconds)

        wait = self._wait(describe, idle, idle_every_seconds=idle_every_seconds)
        while True:
            while number < ledger.num_arrived:
                entry = ledger.arrival(number)
                number += 1
                if entry is not None and (is_wanted is None or is_wanted(entry.id)):
                    yield self._take(entry)
            if is_over():
                return
            wait.until(has_to_look)

    def _take(self, entry: GroupEntry) -> Group:
        """Take an arrived group. The rollouts of an evaluation are not kept."""
        group = entry.group
        assert group is not None
        entry.group = None
        is_kept = not entry.request.evaluation
        self._ledger.move(entry, GroupState.DELIVERED if is_kept else GroupState.GONE)
        return group

    def drop(self, group_ids: Iterable[str]) -> None:
        """Drop groups, in whatever state. Their rollouts are freed, and their ids can be reused."""
        ids_by_node: dict[int, list[str]] = {}
        for entry in self._with_begun_rests(group_ids):
            node = self._node_of(entry)
            if node is not None:
                ids = _ids_of(entry.request) if entry.is_open else [entry.id]
                ids_by_node.setdefault(node, []).extend(ids)
            self._ledger.move(entry, GroupState.GONE)
        for node, ids in ids_by_node.items():
            self._collectors.send(node, Drop(tuple(ids)))
        self._send_requests()

    def _with_begun_rests(self, group_ids: Iterable[str]) -> list[GroupEntry]:
        """Return the entries of groups, and of their rest where nobody has asked for it."""
        entries = {entry.id: entry for entry in self._ledger.find(group_ids)}
        rest_ids = [e.request.rest().group_id for e in entries.values() if e.request.extension]
        rests = {rest.id: rest for rest in self._ledger.find(rest_ids) if not rest.is_submitted}
        return list((entries | rests).values())

    def _node_of(self, entry: GroupEntry) -> int | None:
        """Return the node whose collector samples a group or has its rollouts, if any."""
        if entry.is_open:
            return entry.node
        has_rollouts = not entry.request.evaluation and not self._is_lost(entry)
        return entry.node if has_rollouts else None

    def abort(self, group_ids: Sequence[str], idle: Callable[[], None]) -> tuple[int, int]:
        """Drop requests without an answer, and let no engine work on them.

        Returns the tokens that engines have sampled for them, and how many of these a checkpoint
        had. The tokens on a collector that is gone are unknown, and so are those on an engine that
        does not abort in time.

        idle: called about every half second. Raises `CollectorFailed`, and what `idle` raises.
        """
        entries = self._ledger.find(group_ids)
        self._send_aborts(entries)
        wait = self._wait(
            lambda seconds: "waiting for engines to abort the surplus of a step",
            idle,
            idles_first=True,
            timeout_seconds=self._abort_seconds,
        )
        if not wait.until(lambda: not any(entry.is_open for entry in entries)):
            self._write_log(
                f"warning: engines did not abort requests within {self._abort_seconds:g} s. "
                "Their tokens are in no class of the account"
            )
        num_tokens = 0
        num_saved = 0
        for entry in entries:
            start_tokens = 0
            # The answer to a group that was complete counts what a checkpoint had of it
            if entry.start is not None and entry.state in (*OPEN_STATES, GroupState.GONE):
                start_tokens = entry.start.num_tokens
            num_tokens += entry.generated_tokens + start_tokens
            num_saved += entry.saved_tokens + start_tokens
        self.drop(group_ids)
        return num_tokens, num_saved

    def _send_aborts(self, entries: Iterable[GroupEntry]) -> None:
        ids_by_node: dict[int, list[str]] = {}
        for entry in entries:
            if entry.state is GroupState.WAITING:
                self._ledger.move(entry, GroupState.GONE)
            elif entry.state is GroupState.RUNNING:
                assert entry.node is not None
                self._ledger.move(entry, GroupState.ABORTING)
                ids_by_node.setdefault(entry.node, []).append(entry.id)
        for node, ids in ids_by_node.items():
            self._collectors.send(node, Drop(tuple(ids), is_reported=True))

    def lost_groups(self, group_ids: Iterable[str]) -> list[str]:
        """Return those delivered groups whose rollouts are lost with their collector."""
        self._handle_events()
        return [entry.id for entry in self._ledger.find(group_ids) if self._is_lost(entry)]

    def request_again(self, group_ids: Sequence[str]) -> int:
        """Request delivered groups again, under the same ids. Their rollouts are released.

        Groups that are still in a checkpoint are read there. Returns how many are sampled again.
        """
        entries = [self._ledger[group_id] for group_id in group_ids]
        starts = [e.start if e.state is GroupState.SAVED else None for e in entries]
        self.drop(group_ids)
        num_repeated = starts.count(None)
        self.num_repeated += num_repeated
        self._handle_events()
        for entry, start in zip(entries, starts, strict=True):
            self._add(entry.request, start)
        self._send_requests()
        return num_repeated

    def arrived_groups(self, group_ids: Collection[str]) -> list[Group]:
        """Return the groups with these ids that have arrived and are neither taken nor lost."""
        self._handle_events()
        return [
            entry.group
            for entry in self._ledger.in_states(GroupState.ARRIVED)
            if entry.id in group_ids and entry.group is not None and not self._is_lost(entry)
        ]

    def tokens_of(self, group_id: str) -> int:
        """Return the tokens that engines sampled for a delivered group that is not released."""
        return self._ledger[group_id].generated_tokens

    def saved_tokens_of(self, group_id: str) -> int:
        """Return how many of `tokens_of` a checkpoint had."""
        return self._ledger[group_id].saved_tokens

    def count_in_flight(self) -> int:
        """Return the number of rollouts to train on whose group has not arrived."""
        self._handle_events()
        requests = [entry.request for entry in self._ledger.in_states(*OPEN_STATES)]
        return sum(request.num_samples for request in requests if not request.evaluation)

    def engines_idle_seconds(self) -> float:
        """Return the seconds in which engines were idle since the last call, as a mean over nodes.

        As far as collectors have reported it: with each group, and when they are paused.
        """
        self._handle_events()
        return self._idle_engines.take(self._collectors.epochs)

    # Pauses

    def hold(
        self,
        *,
        abort: Callable[[], None],
        timeout_seconds: float,
        has_to_end: Callable[[], bool] = never,
        idle: Callable[[], None] | None = None,
    ) -> int:
        """Let collectors send no request until `proceed`, and wait until no engine works on one.

        Returns the tokens that collectors have received since the last hold.

        abort: aborts all requests of all engines; they are continued later. It is called about
        every half second, because a request may be on its way.
        has_to_end: asked as often. If it returns True, the time is over. idle: called as often.

        Raises `HoldTimedOut`, and `CollectorFailed`.
        """

        def abort_and_idle() -> None:
            abort()
            if idle is not None:
                idle()

        self._handle_events()
        self._pause.expect(self._collectors.number + 1)
        self._collectors.set_paused(True)
        late_nodes, seconds = self._wait_for_nodes(
            lambda: self._pause.nodes,
            "to stop their requests",
            abort_and_idle,
            timeout_seconds=timeout_seconds,
            has_to_end=has_to_end,
        )
        if late_nodes:
            raise HoldTimedOut(
                f"the engines of node(s) {late_nodes} still worked on requests {seconds:.1f} s "
                "after these were to stop"
            )
        return self._pause.count_new_tokens(self._collectors.epochs)

    def proceed(self) -> None:
        """Let collectors send requests again, and continue interrupted ones."""
        self._collectors.set_paused(False)

    def store_partials(
        self,
        *,
        timeout_seconds: float,
        has_to_end: Callable[[], bool] = never,
        idle: Callable[[], None] | None = None,
    ) -> list[Group]:
        """Let collectors store the sampled parts of all requests, until `release_partials`.

        The result has no group that a collector does not store in time. A group is stored whole.
        has_to_end: asked about every half second. If it returns True, the time is over. idle:
        called as often.

        Raises `CollectorFailed`.
        """

        self._handle_events()
        self.release_partials()
        number = self._stored_groups.expect()
        for node in self.connected_nodes:
            self._collectors.send(node, Store(number))
        late_nodes, seconds = self._wait_for_nodes(
            lambda: self._stored_groups.complete_nodes,
            "to store their open rollouts",
            idle,
            timeout_seconds=timeout_seconds,
            has_to_end=has_to_end,
        )
        if late_nodes:
            self._write_log(
                f"warning: node(s) {late_nodes} did not store all of their open rollouts within "
                f"{seconds:.1f} s: a resumed run samples the others anew"
            )
        open_nodes = {e.id: e.node for e in self._ledger.in_states(*OPEN_STATES)}
        groups = [g for node, g in self._stored_groups.groups if open_nodes.get(g.group_id) == node]
        return groups + self._store_others({group.group_id for group in groups})

    def _wait_for_nodes(
        self,
        answered_nodes: Callable[[], Set[int]],
        task: str,
        idle: Callable[[], None] | None,
        *,
        timeout_seconds: float,
        has_to_end: Callable[[], bool],
    ) -> tuple[list[int], float]:
        """Wait until the collectors of all nodes have answered, or until the time is over.

        Returns the nodes without an answer, and the seconds.
        """

        def late_nodes() -> list[int]:
            return sorted(set(self.connected_nodes) - answered_nodes())

        wait = self._wait(
            lambda seconds: f"waiting for node(s) {late_nodes()} {task}",
            idle,
            idles_first=True,
            timeout_seconds=timeout_seconds,
            has_to_end=has_to_end,
        )
        wait.until(lambda: not late_nodes())
        return late_nodes(), wait.seconds

    def _store_others(self, stored_ids: Collection[str]) -> list[Group]:
        """Store what the last checkpoint had of the groups that no collector has stored."""
        starts = [
            entry.start
            for entry in self._in_order(*OPEN_STATES)
            if entry.start is not None and entry.id not in stored_ids
        ]
        groups = [g for g in map(self._saved_groups.store, starts) if g is not None]
        self._own_stored_ids = tuple(group.group_id for group in groups)
        return groups

    def release_partials(self) -> None:
        """Free what `store_partials` has stored."""
        names_by_node: dict[int, list[str]] = {}
        for node, group in self._stored_groups.release():
            name = partial_name(self._stored_groups.number, group.group_id)
            names_by_node.setdefault(node, []).append(name)
        for node, names in names_by_node.items():
            self._collectors.send(node, Drop(tuple(names)))
        self._saved_groups.release(self._own_stored_ids)
        self._own_stored_ids = ()

    # Where requests go

    def send_waiting(self) -> None:
        """Send all requests that wait, also to nodes without room.

        Nobody sends them later while this process does something else than wait for groups.
        """
        self._send_requests(needs_room=False)

    def _send_requests(self, *, needs_room: bool = True) -> None:
        """Send the requests that wait to nodes, in their order, as far as these have room."""
        waiting = list(self._ledger.in_states(GroupState.WAITING))
        if not waiting or not self._nodes_for(min(waiting, key=_place_of), needs_room=needs_room):
            return
        for entry in sorted(waiting, key=_place_of):
            nodes = self._nodes_for(entry, needs_room=needs_room)
            if not nodes:
                return
            node = self._roster.choose_node(nodes, self._ledger.loads)
            self._ledger.assign(entry, node)
            start = entry.start
            request = msgspec.structs.replace(
                entry.request,
                attempt=entry.attempt,
                start=None if start is None else start.group,
                saved=() if start is None else start.rollouts,
            )
            self._collectors.send(node, request)

    def _nodes_for(self, entry: GroupEntry, *, needs_room: bool) -> list[int]:
        """Return the nodes that may get a group, those with room for it if it needs some."""
        nodes = self._roster.nodes_to_request_from(self.connected_nodes)
        return [node for node in nodes if not needs_room or self._has_room(node, entry)]

    def _has_room(self, node: int, entry: GroupEntry) -> bool:
        """Return True if the engines of a node have slots that go to no rollout before the group's.

        Rollouts of later steps take no room: the collector gives slots to earlier ones first.
        """
        num_slots = self._collectors.slots_per_engine(node) * self._roster.num_engines(node)
        return self._ledger.load_up_to(node, entry.request.step) < num_slots

    def _in_order(self, *states: GroupState) -> list[GroupEntry]:
        """Return the entries in these states, in the order of their requests."""
        return sorted(self._ledger.in_states(*states), key=lambda entry: entry.number)

    def _move_stuck_requests(self) -> None:
        """Move the requests of collectors that can use no engine, if others can."""
        nodes = self._roster.nodes_to_request_from(self.connected_nodes)
        for node in self.connected_nodes:
            is_stuck = node not in nodes and not self._roster.engines_for(node)
            if is_stuck and self._requests_of(node):
                self._move_requests(node)

    def _move_requests(self, node: int) -> None:
        """Take the requests of a collector away, and send them to others."""
        ids = [id_ for entry in self._requests_of(node) for id_ in _ids_of(entry.request)]
        self._collectors.send(node, Drop(tuple(ids)))
        self._detach(node)
        self._send_requests()

    def _requests_of(self, node: int) -> list[GroupEntry]:
        """Return the requests that a node's collector has not answered."""
        entries = self._in_order(GroupState.RUNNING, GroupState.ABORTING)
        return [entry for entry in entries if entry.node == node]

    def _detach(self, node: int) -> None:
        """Take its requests away from a collector. They wait for another one."""
        for entry in self._requests_of(node):
            if entry.state is GroupState.ABORTING:
                self._ledger.move(entry, GroupState.GONE)
                continue
            self._ledger.move(entry, GroupState.WAITING)
            self.num_repeated += 1

    def _is_lost(self, entry: GroupEntry) -> bool:
        """Return True if no collector has the rollouts of a complete group."""
        if entry.state is GroupState.SAVED:
            return True
        is_complete = entry.state in (GroupState.ARRIVED, GroupState.DELIVERED)
        if not is_complete or entry.node is None or entry.request.evaluation:
            return False
        return self._collectors.epochs.get(entry.node) != entry.epoch

    # What collectors say

    def _wait(
        self,
        describe: Callable[[float], str],
        idle: Callable[[], None] | None,
        **limits: Any,
    ) -> Wait:
        return Wait(
            self._wait_for_events, describe=describe, log=self._write_log, idle=idle, **limits
        )

    def _wait_for_events(self, seconds: float) -> None:
        """Wait for an event, and handle all that have arrived. Raises `CollectorFailed`."""
        message = self._hub.poll(seconds)
        while message is not None:
            self._handle(*message)
            message = self._hub.poll(0)
        self._send_requests()

    def _handle_events(self) -> None:
        """Handle what has arrived. Groups wait for `as_completed`. Raises `CollectorFailed`."""
        self._wait_for_events(0)

    def _handle(self, node: int, message: Event) -> None:
        """Process a message. Raises `CollectorFailed`."""
        self._note_idle_engines(node, message)
        match message:
            case CollectorConnected(epoch):
                self._welcome(node, epoch)
            case CollectorGone(epoch, reason):
                self._handle_gone(node, epoch, reason)
            case EngineLeftOut():
                self._handle_failed_engine(node, message)
            case AbortRequests(url, names):
                self._start_aborts(url, names)
            case Problem():
                self._handle_problem(node, message)
            case Served():
                self._pause.take(node, message)
            case Alive():
                self._take_demand(node, message)
            case Partial():
                self._take_partial(node, message)
            case GroupDone() | Dropped():
                self._handle_answer(node, message)
            case _:
                raise _unexpected_message(node, message)

    def _note_idle_engines(self, node: int, message: Event) -> None:
        epochs = self._collectors.epochs
        if isinstance(message, GroupDone | Served) and node in epochs:
            self._idle_engines.note(node, epochs[node], message.engines_idle)

    def _take_demand(self, node: int, message: Alive) -> None:
        """Note how many rollouts of groups need an engine. Those of earlier attempts come late."""
        for entry in self._ledger.find(message.demand):
            attempt, demand = message.demand[entry.id]
            if entry.is_with(node, attempt):
                self._ledger.set_demand(entry, demand)

    def _handle_problem(self, node: int, problem: Problem) -> None:
        """Write a warning, or raise `CollectorFailed`."""
        if problem.exit_code is not None:
            text = f"the collector of node {node} failed: {problem.text}"
            raise CollectorFailed(text, problem.exit_code)
        self._write_log(f"warning: {problem.text}")

    def _handle_answer(self, node: int, message: GroupDone | Dropped) -> None:
        """Take an answer to a request. One to an earlier attempt comes late, and is dropped."""
        group_id = message.group.group_id if isinstance(message, GroupDone) else message.group_id
        entries = self._ledger.find([group_id])
        if not entries or not entries[0].is_with(node, message.attempt):
            if message.attempt >= self._ledger.next_attempt:
                raise _unexpected_message(node, message)
            return
        if isinstance(message, GroupDone):
            self._take_group(entries[0], node, message)
        elif entries[0].state is GroupState.ABORTING:
            entries[0].generated_tokens = message.generated_tokens
            self._ledger.move(entries[0], GroupState.GONE)
        else:
            raise _unexpected_message(node, message)  # nobody has asked to drop it

    def _take_group(self, entry: GroupEntry, node: int, message: GroupDone) -> None:
        """Take a group, without the rollouts of wrong weights."""
        request = entry.request
        if self.on_arrival is not None:
            self.on_arrival(message, time.monotonic() - entry.since)
        entry.epoch = self._collectors.epochs[node]
        entry.generated_tokens = message.generated_tokens
        entry.saved_tokens = 0 if entry.start is None else entry.start.num_tokens
        # An evaluation measures the current weights, so its rollouts may not be older.
        staleness = 0 if request.evaluation else self._max_staleness
        oldest = self._version - staleness
        entry.group = _without_wrong_version(message.group, oldest, self._version)
        self._ledger.move(entry, GroupState.ARRIVED)
        self._take_extension(entry, message)

    def _take_extension(self, probe: GroupEntry, message: GroupDone) -> None:
        """Expect the rest of a group that a collector has extended by the rule of its request.

        Raises `CollectorFailed`.
        """
        rule = probe.request.extension
        is_due = rule is not None and rule.applies_to(message.group)
        if message.is_extended != is_due:
            verb = "extended" if message.is_extended else "did not extend"
            kinds = "none" if rule is None else ", ".join(rule.kinds)
            raise CollectorFailed(
                f"the collector of node {probe.node} {verb} group {probe.id}, which is "
                f"{kind_of(message.group)}. The rule of its request extends: {kinds}"
            )
        if rule is None or not is_due:
            return
        since = min(time.monotonic(), probe.since + message.seconds)
        rest = GroupEntry(
            probe.request.rest(), attempt=message.attempt, since=since, is_submitted=False
        )
        self._ledger.add(rest, GroupState.RUNNING, probe.node)
        assert probe.group is not None
        if not rule.applies_to(probe.group):  # without the rollouts that are rejected here
            self.drop([rest.id])

    def _take_partial(self, node: int, partial: Partial) -> None:
        """Keep what a collector has stored, or free what comes too late."""
        if self._stored_groups.expects(partial.number):
            self._stored_groups.add(node, partial.group)
        elif partial.group is not None:
            name = partial_name(partial.number, partial.group.group_id)
            self._collectors.send(node, Drop((name,)))

    def _welcome(self, node: int, epoch: int) -> None:
        """Configure a collector that has connected, and send it the requests that wait."""
        self._collectors.welcome(node, epoch)
        if self._stored_groups.is_wanted:
            self._collectors.send(node, Store(self._stored_groups.number))
        self._send_requests()
        # Other nodes may have requests that they cannot answer
        self._move_stuck_requests()

    def _handle_gone(self, node: int, epoch: int, reason: str) -> None:
        """Send the requests of a collector that is gone to others. They may have to wait."""
        self._collectors.forget(node, epoch)
        self._pause.forget(node)
        self._stored_groups.forget(node)
        self._detach(node)
        # Perhaps nobody else could use some engine: others try it again
        if self._roster.forget_failures():
            self._collectors.send_state()
        self._send_requests()
        self._write_log(f"{reason}. Its requests go to others, or wait for the next one")
        if self.on_lost_collector is not None:
            self.on_lost_collector(node, epoch, reason)

    def _handle_failed_engine(self, node: int, message: EngineLeftOut) -> None:
        """Take an engine away from a collector that cannot use it.

        An engine of another node counts as failed only once no collector can use it: others may
        reach it.
        """
        engine = self._roster.find(message.url)
        if engine is not None and engine.node != node:
            if not self._roster.can_use(node, engine):
                return  # it was reported already
            self._roster.mark_unreachable(node, engine)
            self._collectors.send_state_to(node)
            if any(self._roster.can_use(other, engine) for other in self.connected_nodes):
                self._write_log(
                    f"node {node} cannot use engine {message.url} of node {engine.node}: "
                    f"{message.reason}"
                )
                self._move_stuck_requests()
                return
        self._roster.left_out.add(message.url)
        self._write_log(
            f"engine {message.url} gets no requests until it is healthy again: {message.reason}"
        )
        if self.on_engine_failure is not None:
            self.on_engine_failure(message.url, message.reason)

    def _describe_wait(self, num_arrived: int, seconds: float) -> str:
        open_entries = self._in_order(*OPEN_STATES)
        oldest = open_entries[0]
        left_out = len(self._roster.left_out)
        num_waiting = sum(entry.state is GroupState.WAITING for entry in open_entries)
        place = "waits for a collector"
        if oldest.node is not None:
            place = f"requested from node {oldest.node}"
        elif self.connected_nodes:
            place = "waits for a node with room"
        return (
            f"waiting for rollouts: {num_arrived} of {num_arrived + len(open_entries)} groups "
            f"arrived in {seconds:.0f} s; group {oldest.id}, {place}, has taken "
            f"{time.monotonic() - oldest.since:.0f} s"
            + (f"; {num_waiting} group(s) wait for a node" if num_waiting else "")
            + (f"; {left_out} engine(s) get no requests" if left_out else "")
        )

    def _write_log(self, text: str) -> None:
        if self._log is not None:
            self._log(text)

    def _start_aborts(self, url: str, names: Sequence[str]) -> None:
        """Abort requests in threads: an engine that is stopped would block this process."""
        if self._abort is None:
            return
        rest = deque(names)
        for _ in range(min(len(names), _ABORT_THREADS)):
            threading.Thread(target=_abort_each, args=(self._abort, url, rest), daemon=True).start()


def _abort_each(abort: Callable[[str, str], None], url: str, names: deque[str]) -> None:
    """Abort requests until no name is left. Other threads take names, too."""
    with contextlib.suppress(IndexError):
        while True:
            name = names.popleft()
            try:
                abort(url, name)
            except EngineError:  # the deadline of `GenerateClient` ends what is left
                names.clear()


def _unexpected_message(node: int, message: Event) -> CollectorFailed:
    return CollectorFailed(
        f"the collector of node {node} sent an unexpected {type(message).__name__}"
    )


def _place_of(entry: GroupEntry) -> tuple[Priority, int]:
    """Return the place of a group among those that wait: the smallest goes first."""
    return entry.request.priority(), entry.number


def _ids_of(request: GroupRequest) -> list[str]:
    """Return the ids under which a collector may work on a request: the rest may have another."""
    if request.extension is None:
        return [request.group_id]
    return [request.group_id, request.rest().group_id]


def _require_same(begun_request: GroupRequest, request: GroupRequest) -> None:
    """Raise ValueError unless the rest of a group is requested as a collector has begun with it.

    It has its place in the order already.
    """
    request = msgspec.structs.replace(
        request, step=begun_request.step, expected_tokens=begun_request.expected_tokens
    )
    if begun_request != request:
        raise ValueError(
            f"group {request.group_id}: its collector samples {begun_request.num_samples} "
            f"rollouts from {begun_request.first_sample} on, and {request.num_samples} from "
            f"{request.first_sample} on are requested"
        )


def _without_wrong_version(group: Group, oldest: int, newest: int) -> Group:
    """Reject rollouts with a token sampled by a version below `oldest` or above `newest`."""
    counts = Counter(group.rejections)
    tokens = Counter(group.rejected_tokens)
    valid_rollouts = []
    for rollout in group.rollouts:
        reason = _version_fault(rollout, oldest, newest)
        if reason is None:
            valid_rollouts.append(rollout)
        else:
            counts[reason] += 1
            tokens[reason] += rollout.num_generated
    if len(valid_rollouts) == len(group.rollouts):
        return group
    return msgspec.structs.replace(
        group,
        rollouts=tuple(valid_rollouts),
        rejections=dict(counts),
        rejected_tokens=dict(tokens),
    )


def _version_fault(rollout: RolloutRef, oldest: int, newest: int) -> str | None:
    """Return the reason to reject a rollout for its weight versions, if any."""
    if rollout.versions and rollout.versions[-1] > newest:
        return NEVER_SENT
    if rollout.versions and rollout.versions[0] < oldest:
        return STALE
    return None
