"""Where rank 0 asks for rollouts and gets groups back as they finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from megatron_rl.contracts.group import Group
from megatron_rl.rollouts.hub import Hub
from megatron_rl.rollouts.messages import (
    Configure,
    Failed,
    GroupDone,
    GroupRequest,
    Pause,
    PausePolicy,
    Release,
    Resume,
    Stop,
)


class CollectorFailed(RuntimeError):
    """A collector reported that it cannot go on."""


class RolloutQueue:
    """Spreads group requests over the nodes' collectors, to the node with the fewest outstanding samples."""

    def __init__(self, hub: Hub, *, max_staleness: int = 0) -> None:
        self._hub = hub
        self._max_staleness = max_staleness
        self._version = 0
        self._outstanding: dict[str, tuple[int, GroupRequest]] = {}
        self._holders: dict[str, int] = {}
        self.generated_tokens = 0

    def configure(self, configurations: dict[int, Configure]) -> None:
        """Send each node's collector its configuration."""
        for node, configuration in configurations.items():
            self._hub.send(node, configuration)

    def set_version(self, version: int) -> None:
        """The trainer's weights are now `version`; staleness is counted from it."""
        self._version = version

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Ask for groups. Raises ValueError for a group id that is outstanding or was delivered and not released."""
        load = dict.fromkeys(self._hub.nodes, 0)
        for node, request in self._outstanding.values():
            load[node] += request.num_samples
        for request in requests:
            if request.group_id in self._outstanding or request.group_id in self._holders:
                raise ValueError(f"group {request.group_id} was submitted already: a group is delivered once")
            node = min(load, key=lambda n: (load[n], n))
            load[node] += request.num_samples
            self._outstanding[request.group_id] = (node, request)
            self._hub.send(node, request)

    @property
    def num_outstanding(self) -> int:
        return len(self._outstanding)

    def as_completed(self, idle: Callable[[], None], *, idle_every_seconds: float = 1.0) -> Iterator[Group]:
        """Yield groups until none is outstanding; call `idle` at least about every `idle_every_seconds`."""
        last = time.monotonic()
        while self._outstanding:
            group = self._next(idle_every_seconds)
            if time.monotonic() - last >= idle_every_seconds or group is None:
                idle()
                last = time.monotonic()
            if group is not None:
                yield group

    def release(self, group_ids: Sequence[str]) -> None:
        """Free the payloads of delivered groups."""
        by_node: dict[int, list[str]] = {}
        for group_id in group_ids:
            node = self._holders.pop(group_id, None)
            if node is not None:
                by_node.setdefault(node, []).append(group_id)
        for node, ids in by_node.items():
            self._hub.send(node, Release(tuple(ids)))

    def pause(self, policy: PausePolicy = PausePolicy.DRAIN) -> None:
        """Let no collector send further requests until `resume`."""
        for node in self._hub.nodes:
            self._hub.send(node, Pause(policy))

    def resume(self) -> None:
        for node in self._hub.nodes:
            self._hub.send(node, Resume())

    def snapshot(self) -> bytes:
        """The requests not yet delivered, as bytes a checkpoint can hold."""
        return msgspec.msgpack.encode([request for _, request in self._outstanding.values()])

    def restore(self, snapshot: bytes) -> None:
        """Submit again what a snapshot had outstanding."""
        self.submit(msgspec.msgpack.decode(snapshot, type=list[GroupRequest]))

    def stop(self) -> None:
        for node in self._hub.nodes:
            self._hub.send(node, Stop())

    def _next(self, timeout_seconds: float) -> Group | None:
        received = self._hub.poll(timeout_seconds)
        if received is None:
            return None
        node, message = received
        if isinstance(message, Failed):
            raise CollectorFailed(f"the collector of node {node} failed: {message.reason}")
        if not isinstance(message, GroupDone) or message.group.group_id not in self._outstanding:
            raise CollectorFailed(f"the collector of node {node} sent an unexpected {type(message).__name__}")
        _, request = self._outstanding.pop(message.group.group_id)
        if request.keep_rollouts:
            self._holders[message.group.group_id] = node
        self.generated_tokens += message.generated_tokens
        return self._without_stale(message.group)

    def _without_stale(self, group: Group) -> Group:
        oldest = self._version - self._max_staleness
        fresh = tuple(s for s in group.samples if not s.versions or s.versions[0] >= oldest)
        stale = len(group.samples) - len(fresh)
        if not stale:
            return group
        rejected = {**group.rejected, "stale": group.rejected.get("stale", 0) + stale}
        return msgspec.structs.replace(group, samples=fresh, rejected=rejected)
