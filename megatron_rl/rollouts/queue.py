"""Queue of rank 0: requests for groups go in, complete groups come out."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import NEVER_SENT, STALE, Group, RolloutRef
from megatron_rl.records.reminder import Reminder
from megatron_rl.rollouts.hub import CollectorHub, CollectorLost
from megatron_rl.rollouts.messages import (
    AbortRequest,
    CallAbandoned,
    Configure,
    EngineBack,
    EngineLeftOut,
    Failed,
    FromCollector,
    GroupDone,
    GroupRequest,
    Release,
    Stop,
    ToCollector,
)
from sglang_bridge.errors import EngineError


class CollectorFailed(Failure):
    """A collector reported an error or sent an unexpected message."""

    exit_code = ExitCode.ENGINE_FAILED


class CollectorRefused(CollectorFailed):
    """A user-defined class cannot be opened by a collector, or too many calls were abandoned."""

    exit_code = ExitCode.REFUSED


@dataclass(frozen=True)
class _Outstanding:
    """A request that a node's collector has not answered. since: on the monotonic clock."""

    node: int
    request: GroupRequest
    since: float


class RolloutQueue:
    """Distributes group requests over the collectors of all nodes.

    Each request goes to the node with the fewest outstanding rollouts.

    generated_tokens: tokens that engines have sampled for delivered groups since the start.
    engines_left_out: URLs of engines that collectors do not use, because they failed.
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
        self._max_staleness = settings.max_staleness
        self._version = 0
        self._outstanding: dict[str, _Outstanding] = {}
        self._loads = Counter[int]()  # outstanding rollouts by node
        self._holders: dict[str, int] = {}  # node by id of a group that is not released yet
        self.generated_tokens = 0

    def configure(self, configurations: Mapping[int, Configure]) -> None:
        """Send each node's collector its configuration."""
        for node, configuration in configurations.items():
            self._send(node, configuration)

    def set_version(self, version: int) -> None:
        """Set the version of the trainer's weights, from which staleness is counted."""
        self._version = version

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Request groups.

        Raises ValueError for a group id that is outstanding, or delivered and not released. Like
        every method that sends, it raises `CollectorFailed` and `CollectorLost`.
        """
        nodes = self._hub.nodes
        for request in requests:
            if request.group_id in self._outstanding or request.group_id in self._holders:
                raise ValueError(
                    f"group {request.group_id} was submitted already: a group is delivered once"
                )
            node = min(nodes, key=lambda n: (self._loads[n], n))
            self._loads[node] += request.num_samples
            self._outstanding[request.group_id] = _Outstanding(node, request, time.monotonic())
            self._send(node, request)

    def as_completed(
        self, idle: Callable[[], None], *, idle_every_seconds: float = 1.0
    ) -> Iterator[Group]:
        """Yield groups until none is outstanding. Call `idle` about every `idle_every_seconds`.

        A long wait is logged at growing intervals. It ends, because collectors limit the time of
        every response, environment and scorer. Raises `CollectorFailed` and `CollectorLost`.
        """
        reminder = Reminder()
        num_arrived = 0
        due = time.monotonic() + idle_every_seconds
        while self._outstanding:
            # The hub may return nothing before the timeout: heartbeats of collectors wake it.
            message = self._hub.poll(max(0.0, due - time.monotonic()))
            group = None if message is None else self._handle(*message)
            if time.monotonic() >= due:
                idle()
                due = time.monotonic() + idle_every_seconds
            if group is not None:
                num_arrived += 1
                yield group
            if self._outstanding and reminder.is_due():
                self._write_log(self._describe_wait(num_arrived, reminder.seconds))

    def release(self, group_ids: Sequence[str]) -> None:
        """Free the rollouts of delivered groups."""
        ids_by_node: dict[int, list[str]] = {}
        for group_id in group_ids:
            node = self._holders.pop(group_id, None)
            if node is not None:
                ids_by_node.setdefault(node, []).append(group_id)
        for node, ids in ids_by_node.items():
            self._send(node, Release(tuple(ids)))

    def stop(self) -> None:
        """End every collector."""
        for node in self._hub.nodes:
            self._send(node, Stop())

    def _send(self, node: int, message: ToCollector) -> None:
        """Send a message. Raises `CollectorLost`.

        Raises `CollectorFailed` if the collector reported the reason for its end before it ended.
        """
        try:
            self._hub.send(node, message)
        except CollectorLost as error:
            for sender, pending_message in self._pending_messages():
                if sender == node and isinstance(pending_message, Failed):
                    raise _failure(node, pending_message) from error
            raise

    def _pending_messages(self) -> Iterator[tuple[int, FromCollector]]:
        with contextlib.suppress(CollectorLost):
            while (message := self._hub.poll(0)) is not None:
                yield message

    def _handle(self, node: int, message: FromCollector) -> Group | None:
        """Process a message and return the group that it delivers, if any."""
        if isinstance(message, Failed):
            raise _failure(node, message)
        if isinstance(message, AbortRequest | EngineLeftOut | EngineBack | CallAbandoned):
            self._handle_news(message)
            return None
        if not isinstance(message, GroupDone) or message.group.group_id not in self._outstanding:
            raise CollectorFailed(
                f"the collector of node {node} sent an unexpected {type(message).__name__}"
            )
        outstanding = self._outstanding.pop(message.group.group_id)
        request = outstanding.request
        self._loads[outstanding.node] -= request.num_samples
        if not request.evaluation:
            self._holders[message.group.group_id] = node
        self.generated_tokens += message.generated_tokens
        # An evaluation measures the current weights, so its rollouts may not be older.
        staleness = 0 if request.evaluation else self._max_staleness
        return _without_wrong_version(message.group, self._version - staleness, self._version)

    def _handle_news(
        self, message: AbortRequest | EngineLeftOut | EngineBack | CallAbandoned
    ) -> None:
        match message:
            case AbortRequest(url, rid):
                # In a thread, because an engine that is stopped would block this process.
                threading.Thread(target=self._try_to_abort, args=(url, rid), daemon=True).start()
            case EngineLeftOut(url, reason):
                self.engines_left_out.add(url)
                self._write_log(f"engine {url} is left out until it is healthy again: {reason}")
            case EngineBack(url):
                self.engines_left_out.discard(url)
                self._write_log(f"engine {url} is used again")
            case CallAbandoned(text):
                self._write_log(f"warning: {text}")

    def _describe_wait(self, num_arrived: int, seconds: float) -> str:
        oldest = next(iter(self._outstanding.values()))
        left_out = len(self.engines_left_out)
        return (
            f"waiting for rollouts: {num_arrived} of {num_arrived + len(self._outstanding)} groups "
            f"arrived in {seconds:.0f} s; group {oldest.request.group_id}, requested from node "
            f"{oldest.node}, has taken {time.monotonic() - oldest.since:.0f} s"
            + (f"; {left_out} engine(s) are left out" if left_out else "")
        )

    def _write_log(self, text: str) -> None:
        if self._log is not None:
            self._log(text)

    def _try_to_abort(self, url: str, rid: str) -> None:
        if self._abort is not None:
            with contextlib.suppress(EngineError):  # the collector's deadline ends the request
                self._abort(url, rid)


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
