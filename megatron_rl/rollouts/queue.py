"""Queue of rank 0: requests for groups go in, complete groups come out.

A group is delivered once. If a collector ends, its requests go to other collectors, or to the one
that replaces it, under the same ids and with the same seeds.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import NEVER_SENT, STALE, Group, RolloutRef
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.credit.group_kinds import kind_of
from megatron_rl.records.reminder import Reminder
from megatron_rl.rollouts.generation.idle_time import IdleEngines
from megatron_rl.rollouts.generation.lent_engines import LentEngines
from megatron_rl.rollouts.hub import CollectorConnected, CollectorGone, CollectorHub, Event
from megatron_rl.rollouts.messages import (
    AbortGroups,
    AbortRequest,
    AddEngine,
    Configure,
    EngineLeftOut,
    Failed,
    GroupAborted,
    GroupDone,
    GroupRequest,
    Held,
    Hold,
    Partial,
    Proceed,
    Release,
    RemoveEngine,
    SetVersion,
    Stop,
    StorePartials,
    ToCollector,
    UserClassWarning,
    Withdraw,
    first_id,
    partial_name,
)
from megatron_rl.rollouts.partials.saved_groups import NOTHING_SAVED, SavedGroup, SavedGroups
from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError

_HOLD_POLL_SECONDS = 0.5
_NO_NODE = -1  # of rollouts that are still in a checkpoint
# An engine aborts a request within a step. A longer wait would cost more than the surplus.
_ABORT_SECONDS = 30.0


def _never() -> bool:
    return False


class CollectorFailed(Failure):
    """A collector reported an error or sent an unexpected message."""

    exit_code = ExitCode.ENGINE_FAILED


class CollectorRefused(CollectorFailed):
    """A user-defined class cannot be opened by a collector."""

    exit_code = ExitCode.REFUSED


class QueueObserver(Protocol):
    """Learns what collectors report about engines and about themselves."""

    def handle_engine_failure(self, url: str, reason: str) -> None:
        """A collector does not use an engine any more, because it failed."""
        ...

    def handle_lost_collector(self, node: int, epoch: int, reason: str) -> None:
        """The collector of a node is gone. Its requests wait, or went to others."""
        ...


class HoldTimedOut(Failure):
    """Requests did not stop in time."""

    exit_code = ExitCode.ENGINE_FAILED


@dataclass
class _Outstanding:
    """A request that was not answered yet. since: on the monotonic clock.

    node: of the collector that has it, None while no collector is connected. attempt: as in
    `GroupRequest`. start: what a checkpoint has of the group.
    is_aborted: its group is of no use, and it is not sent to another collector.
    """

    request: GroupRequest
    since: float
    node: int | None = None
    attempt: int = 0
    start: SavedGroup | None = None
    is_aborted: bool = False


@dataclass(frozen=True)
class _Holder:
    """The collector that holds the rollouts of a delivered group, and the request for them.

    generated_tokens: tokens that engines sampled for it. saved_tokens: those of a checkpoint.
    start: what a checkpoint has of the group, if no collector has read it yet.
    """

    node: int
    epoch: int
    request: GroupRequest
    generated_tokens: int
    saved_tokens: int = 0
    start: SavedGroup | None = None


@dataclass
class _Holding:
    """The state of a hold.

    message: sent to collectors that connect, until `proceed`. last_number: of all these messages.
    answers: by node, to the present hold. num_sampled: by node and epoch, the tokens that the
    collector had received at the last hold.
    """

    message: Hold | None = None
    last_number: int = 0
    answers: dict[int, Held] = field(default_factory=dict)
    num_sampled: Counter[tuple[int, int]] = field(default_factory=Counter)


@dataclass
class _Partials:
    """Holds what there is of open groups.

    saved_groups: in a checkpoint. number: of the last `StorePartials`. groups: the answers to it,
    by node. complete_nodes: those that have stored all. own_ids: of groups that no collector has
    stored, but this process. is_wanted: the answers are not released yet.
    """

    saved_groups: SavedGroups = NOTHING_SAVED
    number: int = 0
    is_wanted: bool = False
    groups: dict[int, list[Group]] = field(default_factory=dict)
    complete_nodes: set[int] = field(default_factory=set)
    own_ids: tuple[str, ...] = ()

    def forget(self, node: int) -> None:
        """Forget what a node has stored."""
        self.groups.pop(node, None)
        self.complete_nodes.discard(node)


@dataclass
class _DroppedRequests:
    """Requests whose answer is not expected any more.

    next_attempt: of further requests, larger than those of all that were dropped. ids: by node, how
    often each was dropped whose answer may be on its way. aborted_tokens: by id, until
    `RolloutQueue.abort` returns them.
    """

    next_attempt: int = 0
    ids: dict[int, Counter[str]] = field(default_factory=dict)
    aborted_tokens: Counter[str] = field(default_factory=Counter)

    def drop(self, attempt: int) -> None:
        """Let further requests differ from this one, which may have had the same id."""
        self.next_attempt = max(self.next_attempt, attempt + 1)

    def take(self, node: int, group_id: str) -> None:
        """Take an answer to a dropped request."""
        self.ids[node][group_id] -= 1
        if not self.ids[node][group_id]:
            del self.ids[node][group_id]


@dataclass
class _ArrivedGroups:
    """Groups that `as_completed` has not yielded yet, by the number of their arrival.

    next_number: of the next one.
    """

    groups: dict[int, Group] = field(default_factory=dict)
    next_number: int = 0

    @property
    def first_number(self) -> int:
        """The number of the first group, `next_number` without one."""
        return next(iter(self.groups), self.next_number)

    def add(self, group: Group) -> None:
        self.groups[self.next_number] = group
        self.next_number += 1

    def take(self, number: int, is_wanted: Callable[[str], bool] | None) -> Group | None:
        """Take the group with this number, if it is there and wanted."""
        group = self.groups.get(number)
        if group is None or not (is_wanted is None or is_wanted(group.group_id)):
            return None
        return self.groups.pop(number)

    def offer_again(self) -> None:
        """Let a running `as_completed` look again at groups that it did not want."""
        groups = list(self.groups.values())
        self.groups.clear()
        for group in groups:
            self.add(group)

    def drop(self, group_ids: Collection[str]) -> None:
        """Drop groups by their ids."""
        for number, group in list(self.groups.items()):
            if group.group_id in group_ids:
                del self.groups[number]


class RolloutQueue:
    """Distributes group requests over the collectors of all nodes.

    Each request goes to the node with the fewest outstanding rollouts for each rank of its engines.
    It waits while no collector is connected. If the last engine of a node leaves, its collector
    gets engines of other nodes and continues its responses on them.

    num_repeated: requests that were sent again, because their collector was gone, or because what a
    checkpoint had of them did not fit.
    engines_left_out: URLs of engines that collectors do not use, because they failed.
    observer: learns of engines and collectors that failed, if set.
    on_arrival: gets the answer to each request, and the seconds since it was submitted, if set.
    abort: aborts a request, given an engine's URL and the request id. None: expired requests are
    not aborted.
    log: writes a line for the user.
    """

    def __init__(
        self,
        hub: CollectorHub,
        settings: RolloutSettings,
        *,
        abort: Callable[[str, str], None] | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._hub = hub
        self._abort = abort
        self._log = log
        self.engines_left_out: set[str] = set()
        self.observer: QueueObserver | None = None
        self.on_arrival: Callable[[GroupDone, float], None] | None = None
        self._max_staleness = settings.max_staleness
        self._version = 0
        self._is_version_set = False
        self._configurations: Mapping[int, Configure] = {}
        self._engines: dict[str, Engine] = {}  # by URL, those that were added
        self._lent_engines = LentEngines()
        self._epochs: dict[int, int] = {}  # by node, the epoch of the collector that is configured
        self._outstanding: dict[str, _Outstanding] = {}
        self._ready = _ArrivedGroups()
        self._loads = Counter[int]()  # outstanding rollouts by node
        self._holders: dict[str, _Holder] = {}  # by id of a group that is not released yet
        self._holding = _Holding()
        self._partials = _Partials()
        self._idle_engines = IdleEngines()
        self._dropped_requests = _DroppedRequests()
        # By id: the rest of groups that a collector has begun with, until it is submitted here
        self._begun_requests: dict[str, GroupRequest] = {}
        self.num_repeated = 0

    def configure(self, configurations: Mapping[int, Configure]) -> None:
        """Set the configuration of each node's collector, also of those that connect later."""
        self._configurations = configurations
        self._handle_events()

    def add_engine(self, engine: Engine) -> None:
        """Let the collector of the engine's node use it. It holds the current weights."""
        self._engines[engine.url] = engine
        self.engines_left_out.discard(engine.url)
        for node in self._lent_engines.remove_engine(engine.url):
            self._send(node, RemoveEngine(engine.url))
        self._send(engine.node, AddEngine(engine))
        self._provide_engines()

    def remove_engine(self, url: str) -> None:
        """Let no collector use an engine. Does nothing for an engine that was not added."""
        engine = self._engines.pop(url, None)
        self.engines_left_out.discard(url)
        if engine is not None:
            for node in [engine.node, *self._lent_engines.remove_engine(url)]:
                self._send(node, RemoveEngine(url))
            self._provide_engines()

    def set_version(self, version: int) -> None:
        """Set the version of the trainer's weights, which the engines hold now."""
        is_new = version != self._version
        self._version = version
        self._is_version_set = True
        if is_new:
            # Before responses that wait for the new weights go on, perhaps on such an engine
            self._take_back_engines()
        for node in self._epochs:
            self._send(node, SetVersion(version))
        if is_new:
            self._lent_engines.forget_failures()
            self._provide_engines()

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Request groups. The rest of a group is not sent again if a collector has begun with it.

        Raises ValueError for a group id that is outstanding, or delivered and not released, and for
        the rest of a group that is not what its rule says. Raises `CollectorFailed`.
        """
        self._handle_events()
        for request in requests:
            begun_request = self._begun_requests.pop(request.group_id, None)
            if begun_request is not None:
                _require_same(begun_request, request)
                self._ready.offer_again()  # its answer may have come already
                continue
            if request.group_id in self._outstanding or request.group_id in self._holders:
                raise ValueError(
                    f"group {request.group_id} was submitted already: a group is delivered once"
                )
            self._request(request, self._partials.saved_groups.take(request))
        self.num_repeated += self._partials.saved_groups.count_misfits()

    def _request(self, request: GroupRequest, start: SavedGroup | None) -> None:
        """Send a request to a collector. start: what a checkpoint has of the group."""
        if start is not None and start.is_finished:
            # Its rest may be in the checkpoint, too: nobody begins with it before it is requested
            request = msgspec.structs.replace(request, extension=None)
        attempt = self._dropped_requests.next_attempt
        outstanding = _Outstanding(request, time.monotonic(), attempt=attempt, start=start)
        self._outstanding[request.group_id] = outstanding
        self._assign(outstanding)

    def restore(self, groups: SavedGroups) -> None:
        """Continue the groups of a checkpoint once they are submitted, instead of new ones."""
        self._partials.saved_groups = groups

    def drop_saved(self) -> int:
        """Drop the groups of a checkpoint that no request asked for. Returns their tokens."""
        return self._partials.saved_groups.drop()

    def hold_saved(self, groups: Iterable[SavedGroup], sampling: Sampling, group_size: int) -> None:
        """Count finished groups of a checkpoint as delivered and lost, so that they can be read.

        sampling, group_size: of groups that are sampled anew, because their collector is lost
        later. These are whole groups, also where the checkpoint has a probe.
        """
        for start in groups:
            group = start.group
            tokens = start.num_tokens
            request = GroupRequest(
                group_id=group.group_id,
                prompt=group.prompt,
                num_samples=group_size,
                sampling=sampling,
            )
            self._holders[group.group_id] = _Holder(_NO_NODE, 0, request, tokens, tokens, start)

    def as_completed(
        self,
        idle: Callable[[], None],
        *,
        is_wanted: Callable[[str], bool] | None = None,
        idle_every_seconds: float = 1.0,
    ) -> Iterator[Group]:
        """Yield groups until none is outstanding. Call `idle` about every `idle_every_seconds`.

        is_wanted: whether to yield the group of an id. Others wait for another call. None: yield
        all.
        A long wait is logged at growing intervals. It ends, because collectors limit the time of
        every response, environment and scorer, and `idle` limits the time without engines or
        collectors. Raises `CollectorFailed`, and what `idle` raises.
        """
        reminder = Reminder()
        num_arrived = 0
        due = time.monotonic() + idle_every_seconds
        number = self._ready.first_number
        while True:
            while number < self._ready.next_number:
                ready_group = self._ready.take(number, is_wanted)
                number += 1
                if ready_group is not None:
                    yield ready_group
            if not any(is_wanted is None or is_wanted(id_) for id_ in self._outstanding):
                return
            # The hub may return nothing before the timeout: heartbeats of collectors wake it.
            message = self._hub.poll(max(0.0, due - time.monotonic()))
            group = None if message is None else self._handle(*message)
            if group is not None:
                num_arrived += 1
                self._ready.add(group)  # `idle` may raise
            if time.monotonic() >= due:
                idle()
                due = time.monotonic() + idle_every_seconds
            if self._outstanding and reminder.is_due():
                self._write_log(self._describe_wait(num_arrived, reminder.seconds))

    def withdraw(self, group_ids: Sequence[str]) -> None:
        """Drop requests, with or without an answer. The same ids may be requested again."""
        group_ids = [*group_ids, *self._begun_ids(group_ids)]
        ids_by_node: dict[int, list[str]] = {}
        for group_id in group_ids:
            outstanding = self._forget(group_id)
            if outstanding is not None and outstanding.node is not None:
                self._loads[outstanding.node] -= outstanding.request.num_samples
                ids_by_node.setdefault(outstanding.node, []).extend(_ids_of(outstanding.request))
        for node, ids in ids_by_node.items():
            self._send(node, Withdraw(tuple(ids)))
            self._dropped_requests.ids.setdefault(node, Counter()).update(ids)
            self._take_back_unneeded(node)
        dropped_ids = set(group_ids)
        for group_id in group_ids:
            self._begun_requests.pop(group_id, None)
        self._ready.drop(dropped_ids)
        self.release(group_ids)

    def _begun_ids(self, group_ids: Sequence[str]) -> list[str]:
        """Return the ids of the rest of these groups, where it was not submitted here."""
        ids = set(group_ids)
        return [id_ for id_ in self._begun_requests if first_id(id_) in ids and id_ not in ids]

    def abort(self, group_ids: Sequence[str], idle: Callable[[], None]) -> tuple[int, int]:
        """Drop requests without an answer, and let no engine work on them.

        Returns the tokens that engines have sampled for them, and how many of these a checkpoint
        had. Those of a collector that is gone are unknown, and those of an engine that does not
        abort within half a minute.

        idle: called about every half second. Raises `CollectorFailed`, and what `idle` raises.
        """
        starts = {
            group_id: self._outstanding[group_id].start
            for group_id in group_ids
            if group_id in self._outstanding
        }
        self._send_aborts(group_ids)
        self._wait_for_aborts(group_ids, idle)
        num_tokens = 0
        num_saved = 0
        for group_id in group_ids:
            num_tokens += self._dropped_requests.aborted_tokens.pop(group_id, 0)
            start = starts.get(group_id)
            if group_id in self._holders:  # it was complete before it was aborted
                num_tokens += self.tokens_of(group_id)
                num_saved += self.saved_tokens_of(group_id)
            elif start is not None:
                num_tokens += start.num_tokens
                num_saved += start.num_tokens
        self.withdraw(group_ids)
        return num_tokens, num_saved

    def _wait_for_aborts(self, group_ids: Sequence[str], idle: Callable[[], None]) -> None:
        reminder = Reminder()
        deadline = time.monotonic() + _ABORT_SECONDS
        while any(group_id in self._outstanding for group_id in group_ids):
            self._wait_for_events(_HOLD_POLL_SECONDS)
            idle()
            if time.monotonic() > deadline:
                self._write_log(
                    f"warning: engines did not abort requests within {_ABORT_SECONDS:g} s. Their "
                    "tokens are in no class of the account"
                )
                return
            if reminder.is_due():
                self._write_log("waiting for engines to abort the surplus of a step")

    def _send_aborts(self, group_ids: Sequence[str]) -> None:
        ids_by_node: dict[int, list[str]] = {}
        for group_id in group_ids:
            outstanding = self._outstanding.get(group_id)
            if outstanding is None:
                continue
            outstanding.is_aborted = True
            if outstanding.node is None:
                self._forget(group_id)
            else:
                ids_by_node.setdefault(outstanding.node, []).append(group_id)
        for node, ids in ids_by_node.items():
            self._send(node, AbortGroups(tuple(ids)))

    def lost_groups(self, group_ids: Sequence[str]) -> list[str]:
        """Return those delivered groups whose rollouts are lost with their collector."""
        self._handle_events()
        return [group_id for group_id in group_ids if self._is_lost(group_id)]

    def count_in_flight(self) -> int:
        """Return the number of rollouts to train on whose group has not arrived."""
        self._handle_events()
        requests = [outstanding.request for outstanding in self._outstanding.values()]
        return sum(request.num_samples for request in requests if not request.evaluation)

    def engines_idle_seconds(self) -> float:
        """Return the seconds in which engines were idle since the last call, as a mean over nodes.

        As far as collectors have reported it: with each group, and when they hold requests.
        """
        self._handle_events()
        return self._idle_engines.take(self._epochs)

    def _note_idle_engines(self, node: int, message: Event) -> None:
        if isinstance(message, GroupDone | Held) and node in self._epochs:
            self._idle_engines.note(node, self._epochs[node], message.engines_idle)

    def tokens_of(self, group_id: str) -> int:
        """Return the tokens that engines sampled for a delivered group that is not released."""
        return self._holders[group_id].generated_tokens

    def saved_tokens_of(self, group_id: str) -> int:
        """Return those of `tokens_of` that a checkpoint had."""
        return self._holders[group_id].saved_tokens

    def request_again(self, group_ids: Sequence[str]) -> int:
        """Request delivered groups again, under the same ids. Their rollouts are released.

        Those that are still in a checkpoint are read there. Returns how many are sampled again.
        """
        holders = [self._holders[group_id] for group_id in group_ids]
        self.release(group_ids)
        num_repeated = sum(holder.start is None for holder in holders)
        self.num_repeated += num_repeated
        self._handle_events()
        for holder in holders:
            self._request(holder.request, holder.start)
        return num_repeated

    def hold(
        self,
        *,
        abort: Callable[[], None],
        timeout_seconds: float,
        has_to_end: Callable[[], bool] = _never,
        idle: Callable[[], None] | None = None,
    ) -> int:
        """Let collectors send no request until `proceed`, and wait until no engine works on one.

        Returns the tokens that collectors have received since the last hold.

        abort: aborts all requests of all engines; they are continued later. It is called about
        every half second, because a request may be on its way.
        has_to_end: asked as often. If it returns True, the time is over. idle: called as often.

        Raises `HoldTimedOut`, and `CollectorFailed`.
        """
        self._handle_events()
        self._holding.answers = {}
        self._holding.last_number += 1
        self._holding.message = Hold(self._holding.last_number)
        for node in self.connected_nodes:
            self._send(node, self._holding.message)
        reminder = Reminder()
        start = time.monotonic()
        while waiting_nodes := set(self.connected_nodes) - self._holding.answers.keys():
            seconds = time.monotonic() - start
            if seconds > timeout_seconds or has_to_end():
                raise HoldTimedOut(
                    f"the engines of node(s) {sorted(waiting_nodes)} still worked on requests "
                    f"{seconds:.1f} s after these were to stop"
                )
            abort()
            if idle is not None:
                idle()
            self._wait_for_events(_HOLD_POLL_SECONDS)
            if reminder.is_due():
                self._write_log(f"waiting for requests of node(s) {sorted(waiting_nodes)} to stop")
        return self._count_new_tokens()

    def _take_held(self, node: int, message: Held) -> None:
        """Take an answer to the present hold. Answers to earlier ones come late."""
        hold = self._holding.message
        if hold is not None and message.number == hold.number:
            self._holding.answers[node] = message

    def _count_new_tokens(self) -> int:
        """Return the tokens that collectors have received since the last call."""
        num_tokens = 0
        for node, message in self._holding.answers.items():
            key = (node, self._epochs[node])
            num_tokens += message.num_sampled - self._holding.num_sampled[key]
            self._holding.num_sampled[key] = message.num_sampled
        return num_tokens

    def proceed(self) -> None:
        """Let collectors send requests again, and continue those that were interrupted."""
        self._holding.message = None
        for node in self.connected_nodes:
            self._send(node, Proceed())

    def arrived_groups(self, group_ids: Collection[str]) -> list[Group]:
        """Return those of these groups that nobody has taken yet and that are not lost."""
        self._handle_events()
        groups = self._ready.groups.values()
        return [g for g in groups if g.group_id in group_ids and not self._is_lost(g.group_id)]

    def store_partials(
        self,
        *,
        timeout_seconds: float,
        has_to_end: Callable[[], bool] = _never,
        idle: Callable[[], None] | None = None,
    ) -> list[Group]:
        """Let collectors store what there is of all requests, until `release_partials`.

        What a collector does not store in time is left out. A group is stored whole or not.
        has_to_end: asked about every half second. If it returns True, the time is over. idle:
        called as often.

        Raises `CollectorFailed`.
        """
        self._handle_events()
        self.release_partials()
        self._partials.number += 1
        self._partials.is_wanted = True
        for node in self.connected_nodes:
            self._send(node, StorePartials(self._partials.number))
        start = time.monotonic()
        while waiting_nodes := set(self.connected_nodes) - self._partials.complete_nodes:
            seconds = time.monotonic() - start
            if seconds > timeout_seconds or has_to_end():
                self._write_log(
                    f"warning: node(s) {sorted(waiting_nodes)} did not store all of their open "
                    f"rollouts within {seconds:.1f} s: a resumed run samples the others anew"
                )
                break
            if idle is not None:
                idle()
            self._wait_for_events(_HOLD_POLL_SECONDS)
        groups = [
            group
            for node, node_groups in self._partials.groups.items()
            for group in node_groups
            if self._is_outstanding(node, group.group_id)
        ]
        return groups + self._store_others({group.group_id for group in groups})

    def _store_others(self, stored_ids: Collection[str]) -> list[Group]:
        """Store what the last checkpoint had of the groups that no collector has stored."""
        starts = [
            outstanding.start
            for group_id, outstanding in self._outstanding.items()
            if outstanding.start is not None and group_id not in stored_ids
        ]
        groups = [g for g in map(self._partials.saved_groups.store, starts) if g is not None]
        self._partials.own_ids = tuple(group.group_id for group in groups)
        return groups

    def release_partials(self) -> None:
        """Free what `store_partials` has stored."""
        for node, groups in self._partials.groups.items():
            self._release_partials_of(node, self._partials.number, groups)
        self._partials.groups = {}
        self._partials.complete_nodes = set()
        self._partials.saved_groups.release(self._partials.own_ids)
        self._partials.own_ids = ()
        self._partials.is_wanted = False

    def _release_partials_of(self, node: int, number: int, groups: Sequence[Group]) -> None:
        names = [partial_name(number, group.group_id) for group in groups]
        self._send(node, Release(tuple(names)))

    def _take_partial(self, node: int, partial: Partial) -> None:
        """Keep what a collector has stored, or free what comes too late."""
        is_wanted = self._partials.is_wanted and partial.number == self._partials.number
        if partial.group is None:
            if is_wanted:
                self._partials.complete_nodes.add(node)
        elif is_wanted:
            self._partials.groups.setdefault(node, []).append(partial.group)
        else:
            self._release_partials_of(node, partial.number, [partial.group])

    def _is_outstanding(self, node: int, group_id: str) -> bool:
        outstanding = self._outstanding.get(group_id)
        return outstanding is not None and outstanding.node == node

    def release(self, group_ids: Sequence[str]) -> None:
        """Free the rollouts of delivered groups."""
        ids_by_node: dict[int, list[str]] = {}
        for group_id in group_ids:
            is_lost = self._is_lost(group_id)
            holder = self._holders.pop(group_id, None)
            if holder is not None and not is_lost:
                ids_by_node.setdefault(holder.node, []).append(group_id)
        for node, ids in ids_by_node.items():
            self._send(node, Release(tuple(ids)))

    def disconnect_before(self, node: int, epoch: int, reason: str) -> None:
        """Deliver nothing more of a collector of an earlier epoch: its process has ended."""
        connected_epoch = self._epochs.get(node)
        if connected_epoch is not None and connected_epoch < epoch:
            self._hub.disconnect(node, connected_epoch, reason)

    @property
    def connected_nodes(self) -> list[int]:
        """The nodes whose collectors are connected and configured."""
        return [node for node in self._hub.nodes if self._is_configured(node)]

    def stop(self) -> None:
        """End every collector."""
        for node in self._hub.nodes:
            self._hub.send(node, Stop())

    def _is_configured(self, node: int) -> bool:
        """Return False for a collector whose connection was not handled yet."""
        return node in self._epochs and self._epochs[node] == self._hub.epoch(node)

    def _send(self, node: int, message: ToCollector) -> None:
        """Send a message. A collector that is not configured yet gets what it needs then."""
        if self._is_configured(node):
            self._hub.send(node, message)

    def _assign(self, outstanding: _Outstanding) -> None:
        """Send a request to the node with the fewest outstanding rollouts for each engine rank.

        It waits if there is no node.
        """
        nodes = self._nodes_to_request_from()
        if not nodes:
            return
        num_ranks = Counter[int]()
        for engine in self._engines.values():
            num_ranks[engine.node] += engine.tp
        node = min(nodes, key=lambda n: (self._loads[n] / max(num_ranks[n], 1), n))
        outstanding.node = node
        self._loads[node] += outstanding.request.num_samples
        if node not in self._nodes_with_engines():
            self._lend_engines(node)
        start = outstanding.start
        request = msgspec.structs.replace(
            outstanding.request,
            attempt=outstanding.attempt,
            start=None if start is None else start.group,
            saved=() if start is None else start.rollouts,
        )
        self._send(node, request)

    def _nodes_to_request_from(self) -> list[int]:
        """Return the nodes that have engines. If there is none: those that can use other engines.

        If no node can use an engine, it returns all nodes: some environments need no engine.
        """
        nodes_with_engines = self._nodes_with_engines()
        if nodes_with_engines:
            return nodes_with_engines
        connected_nodes = self.connected_nodes
        borrowers = [
            node
            for node in connected_nodes
            if any(self._lent_engines.is_usable(node, engine) for engine in self._engines.values())
        ]
        return borrowers or connected_nodes

    def _nodes_with_engines(self) -> list[int]:
        nodes = {engine.node for engine in self._engines.values()}
        return [node for node in self.connected_nodes if node in nodes]

    def _provide_engines(self) -> None:
        """Lend engines to the collectors that have requests and no engine of their own node.

        If a collector can use none of them, its requests move to other nodes.
        """
        nodes_with_engines = self._nodes_with_engines()
        nodes_to_request_from = self._nodes_to_request_from()
        for node in self.connected_nodes:
            if not self._loads[node] or node in nodes_with_engines:
                continue
            self._lend_engines(node)
            if node not in self._lent_engines.nodes and node not in nodes_to_request_from:
                self._move_requests(node)

    def _lend_engines(self, node: int) -> None:
        for engine in self._lent_engines.lend(node, self._engines.values()):
            self._send(node, AddEngine(engine))

    def _take_back_engines(self) -> None:
        """Take engines back from the nodes that have their own again.

        No engine works on a request right after a weight sync, so none is interrupted.
        """
        nodes_with_engines = self._nodes_with_engines()
        for node in self._lent_engines.nodes:
            if node in nodes_with_engines:
                self._take_back_engines_of(node)

    def _take_back_unneeded(self, node: int) -> None:
        """Take engines back from a node without requests."""
        if not self._loads[node]:
            self._take_back_engines_of(node)

    def _take_back_engines_of(self, node: int) -> None:
        for url in self._lent_engines.take_back(node):
            self._send(node, RemoveEngine(url))

    def _handle_failed_engine(self, node: int, message: EngineLeftOut) -> None:
        """Take an engine away from a node's collector, which cannot use it.

        An engine of another node counts as failed only once no collector can use it: others may
        reach it.
        """
        engine = self._engines.get(message.url)
        if engine is None or engine.node == node:
            self._handle_news(message)
            return
        if not self._lent_engines.is_lent(node, message.url):
            return  # it was taken back meanwhile
        self._lent_engines.mark_unusable(node, message.url)
        self._send(node, RemoveEngine(message.url))
        if any(self._lent_engines.is_usable(other, engine) for other in self.connected_nodes):
            self._write_log(
                f"node {node} cannot use engine {message.url} of node {engine.node}: "
                f"{message.reason}"
            )
            self._provide_engines()
        else:
            self._handle_news(message)

    def _move_requests(self, node: int) -> None:
        """Withdraw the requests of a node, and send them to others."""
        group_ids = [
            id_
            for outstanding in self._outstanding.values()
            if outstanding.node == node
            for id_ in _ids_of(outstanding.request)
        ]
        self._send(node, Withdraw(tuple(group_ids)))
        self._dropped_requests.ids.setdefault(node, Counter()).update(group_ids)
        self._detach(node)
        self._assign_waiting()

    def _detach(self, node: int) -> None:
        """Take its requests away from a node. They wait for another one."""
        self._loads[node] = 0
        for group_id, outstanding in list(self._outstanding.items()):
            if outstanding.node != node:
                continue
            if outstanding.is_aborted:
                self._forget(group_id)
                continue
            outstanding.node = None
            self._dropped_requests.drop(outstanding.attempt)
            outstanding.attempt += 1
            self.num_repeated += 1

    def _forget(self, group_id: str) -> _Outstanding | None:
        """Expect no answer to a request."""
        outstanding = self._outstanding.pop(group_id, None)
        if outstanding is not None:
            self._dropped_requests.drop(outstanding.attempt)
        return outstanding

    def _is_lost(self, group_id: str) -> bool:
        holder = self._holders.get(group_id)
        return holder is not None and self._epochs.get(holder.node) != holder.epoch

    def _wait_for_events(self, seconds: float) -> None:
        """Wait for an event, and handle all that have arrived."""
        message = self._hub.poll(seconds)
        group = None if message is None else self._handle(*message)
        if group is not None:
            self._ready.add(group)
        self._handle_events()

    def _handle_events(self) -> None:
        """Handle what has arrived. Groups wait for `as_completed`. Raises `CollectorFailed`."""
        while (message := self._hub.poll(0)) is not None:
            group = self._handle(*message)
            if group is not None:
                self._ready.add(group)

    def _handle(self, node: int, message: Event) -> Group | None:
        """Process a message and return the group that it delivers, if any."""
        self._note_idle_engines(node, message)
        match message:
            case CollectorConnected(epoch):
                self._welcome(node, epoch)
            case CollectorGone(epoch, reason):
                self._handle_gone(node, epoch, reason)
            case Failed():
                raise _failure(node, message)
            case EngineLeftOut():
                self._handle_failed_engine(node, message)
            case AbortRequest() | UserClassWarning():
                self._handle_news(message)
            case Held():
                self._take_held(node, message)
            case Partial():
                self._take_partial(node, message)
            case GroupDone() if self._is_expected(node, message):
                return self._take(node, message)
            case GroupAborted():
                self._take_aborted(node, message)
            case GroupDone() if message.group.group_id in self._dropped_requests.ids.get(node, ()):
                self._dropped_requests.take(node, message.group.group_id)
            case _:
                raise CollectorFailed(
                    f"the collector of node {node} sent an unexpected {type(message).__name__}"
                )
        return None

    def _is_expected(self, node: int, message: GroupDone) -> bool:
        """Return False for the answer to a request that was withdrawn."""
        group_id = message.group.group_id
        outstanding = self._outstanding.get(group_id)
        if outstanding is None or outstanding.node != node:
            return False
        # After a withdrawal, the node may have the request for the second time
        is_unique = group_id not in self._dropped_requests.ids.get(node, ())
        return is_unique or outstanding.attempt == message.attempt

    def _welcome(self, node: int, epoch: int) -> None:
        """Configure a collector that has connected, and send it the requests that wait."""
        self._epochs[node] = epoch
        self._loads[node] = 0
        self._lent_engines.take_back(node)
        if node in self._configurations:
            self._send(node, self._configurations[node])
        if self._is_version_set:
            self._send(node, SetVersion(self._version))
        for engine in self._engines.values():
            if engine.node == node:
                self._send(node, AddEngine(engine))
        if self._holding.message is not None:
            self._send(node, self._holding.message)
        if self._partials.is_wanted:
            self._send(node, StorePartials(self._partials.number))
        self._assign_waiting()
        # Other nodes may have requests that they cannot answer
        self._provide_engines()

    def _handle_gone(self, node: int, epoch: int, reason: str) -> None:
        """Send the requests of a collector that is gone to others. They may have to wait."""
        if self._epochs.get(node) == epoch:
            del self._epochs[node]
        self._holding.answers.pop(node, None)
        self._partials.forget(node)
        self._dropped_requests.ids.pop(node, None)
        self._detach(node)
        # Perhaps nobody else could use some engine: others try it again
        self._lent_engines.forget_failures()
        self._assign_waiting()
        self._write_log(f"{reason}. Its requests go to others, or wait for the next one")
        if self.observer is not None:
            self.observer.handle_lost_collector(node, epoch, reason)

    def _assign_waiting(self) -> None:
        for outstanding in self._outstanding.values():
            if outstanding.node is None:
                self._assign(outstanding)

    def _take(self, node: int, message: GroupDone) -> Group:
        """Take a group out of the outstanding ones."""
        outstanding = self._outstanding.pop(message.group.group_id)
        request = outstanding.request
        self._loads[node] -= request.num_samples
        if self.on_arrival is not None:
            self.on_arrival(message, time.monotonic() - outstanding.since)
        if not request.evaluation:
            tokens = message.generated_tokens
            saved_tokens = 0 if outstanding.start is None else outstanding.start.num_tokens
            holder = _Holder(node, self._epochs[node], request, tokens, saved_tokens)
            self._holders[message.group.group_id] = holder
        # An evaluation measures the current weights, so its rollouts may not be older.
        staleness = 0 if request.evaluation else self._max_staleness
        group = _without_wrong_version(message.group, self._version - staleness, self._version)
        self._take_extension(node, message, outstanding, group)
        self._take_back_unneeded(node)
        return group

    def _take_extension(
        self, node: int, message: GroupDone, probe: _Outstanding, usable: Group
    ) -> None:
        """Expect the rest of a group that a collector has extended by the rule of its request.

        usable: the probe without rollouts that are rejected here. Raises `CollectorFailed`.
        """
        rule = probe.request.extension
        is_due = rule is not None and rule.applies_to(message.group)
        if message.is_extended != is_due:
            verb = "extended" if message.is_extended else "did not extend"
            kinds = "none" if rule is None else ", ".join(rule.kinds)
            raise CollectorFailed(
                f"the collector of node {node} {verb} group {message.group.group_id}, which is "
                f"{kind_of(message.group)}. The rule of its request extends: {kinds}"
            )
        if not is_due:
            return
        assert rule is not None
        request = probe.request.rest()
        since = min(time.monotonic(), probe.since + message.seconds)
        self._outstanding[request.group_id] = _Outstanding(request, since, node, message.attempt)
        self._loads[node] += request.num_samples
        if rule.applies_to(usable):
            self._begun_requests[request.group_id] = request
        else:
            self.withdraw([request.group_id])

    def _take_aborted(self, node: int, message: GroupAborted) -> None:
        """Take an aborted request out of the outstanding ones, unless it was dropped meanwhile."""
        outstanding = self._outstanding.get(message.group_id)
        if (
            outstanding is None
            or not outstanding.is_aborted
            or (outstanding.node, outstanding.attempt) != (node, message.attempt)
        ):
            return
        self._forget(message.group_id)
        self._loads[node] -= outstanding.request.num_samples
        self._dropped_requests.aborted_tokens[message.group_id] += message.generated_tokens
        self._take_back_unneeded(node)

    def _handle_news(self, message: AbortRequest | EngineLeftOut | UserClassWarning) -> None:
        match message:
            case AbortRequest(url, rid):
                # In a thread, because an engine that is stopped would block this process.
                threading.Thread(target=self._try_to_abort, args=(url, rid), daemon=True).start()
            case EngineLeftOut(url, reason):
                self.engines_left_out.add(url)
                self._write_log(
                    f"engine {url} gets no requests until it is healthy again: {reason}"
                )
                if self.observer is not None:
                    self.observer.handle_engine_failure(url, reason)
            case UserClassWarning(text):
                self._write_log(f"warning: {text}")

    def _describe_wait(self, num_arrived: int, seconds: float) -> str:
        oldest = next(iter(self._outstanding.values()))
        left_out = len(self.engines_left_out)
        place = "waits for a collector"
        if oldest.node is not None:
            place = f"requested from node {oldest.node}"
        return (
            f"waiting for rollouts: {num_arrived} of {num_arrived + len(self._outstanding)} groups "
            f"arrived in {seconds:.0f} s; group {oldest.request.group_id}, {place}, has taken "
            f"{time.monotonic() - oldest.since:.0f} s"
            + (f"; {left_out} engine(s) are left out" if left_out else "")
        )

    def _write_log(self, text: str) -> None:
        if self._log is not None:
            self._log(text)

    def _try_to_abort(self, url: str, rid: str) -> None:
        if self._abort is not None:
            with contextlib.suppress(EngineError):  # the collector's deadline ends the request
                self._abort(url, rid)


def _ids_of(request: GroupRequest) -> list[str]:
    """Return the ids under which a collector may work on a request: the rest may have another."""
    if request.extension is None:
        return [request.group_id]
    return [request.group_id, request.rest().group_id]


def _require_same(begun_request: GroupRequest, request: GroupRequest) -> None:
    """Raise ValueError unless the rest of a group is requested as a collector has begun with it."""
    if begun_request != request:
        raise ValueError(
            f"group {request.group_id}: its collector samples {begun_request.num_samples} "
            f"rollouts from {begun_request.first_sample} on, and {request.num_samples} from "
            f"{request.first_sample} on are requested"
        )


def _failure(node: int, message: Failed) -> CollectorFailed:
    kind = CollectorRefused if message.is_refusal else CollectorFailed
    return kind(f"the collector of node {node} failed: {message.reason}")


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
