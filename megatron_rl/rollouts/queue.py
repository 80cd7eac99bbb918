"""Where rank 0 asks for rollouts and gets groups back as they finish."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import NEVER_SENT, STALE, Group, RolloutRef
from megatron_rl.rollouts.hub import CollectorLost, Hub
from megatron_rl.rollouts.messages import (
    AbortRequest,
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
    """A collector reported that it cannot go on."""

    exit_code = ExitCode.ENGINE_FAILED


class CollectorRefused(CollectorFailed):
    """A class of the user's own does not open in the collector's process."""

    exit_code = ExitCode.REFUSED


class RolloutQueue:
    """Spreads group requests over the nodes' collectors, to the node with the fewest outstanding
    rollouts.

    generated_tokens: what engines have drawn for delivered groups since the start.
    engines_left_out: URLs of engines that collectors do not ask any more because they failed.
    abort: makes the engine at a URL abort a request; None: expired requests are given up. say:
    tells a person what happens to engines.
    """

    def __init__(
        self,
        hub: Hub,
        settings: RolloutSettings,
        *,
        abort: Callable[[str, str], None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._hub = hub
        self._abort = abort
        self._say = say
        self.engines_left_out: set[str] = set()
        self._max_staleness = settings.max_staleness
        self._version = 0
        self._outstanding: dict[str, tuple[int, GroupRequest]] = {}
        self._holders: dict[str, int] = {}
        self.generated_tokens = 0

    def configure(self, configurations: Mapping[int, Configure]) -> None:
        """Send each node's collector its configuration."""
        for node, configuration in configurations.items():
            self._send(node, configuration)

    def set_version(self, version: int) -> None:
        """The trainer's weights are now `version`; staleness is counted from it."""
        self._version = version

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Ask for groups. Raises `ValueError` for a group id that is outstanding or was delivered
        and not released.

        Like every method that sends, it raises `CollectorFailed` and `CollectorLost`.
        """
        load = dict.fromkeys(self._hub.nodes, 0)
        for node, request in self._outstanding.values():
            load[node] += request.num_samples
        for request in requests:
            if request.group_id in self._outstanding or request.group_id in self._holders:
                raise ValueError(
                    f"group {request.group_id} was submitted already: a group is delivered once"
                )
            node = min(load, key=lambda n: (load[n], n))
            load[node] += request.num_samples
            self._outstanding[request.group_id] = (node, request)
            self._send(node, request)

    def as_completed(
        self, idle: Callable[[], None], *, idle_every_seconds: float = 1.0
    ) -> Iterator[Group]:
        """Yield groups until none is outstanding; call `idle` about every `idle_every_seconds`.

        Raises `CollectorFailed` and `CollectorLost`.
        """
        due = time.monotonic() + idle_every_seconds
        while self._outstanding:
            # nothing may have come although the hub was woken: every collector says that it is
            # alive
            received = self._hub.poll(max(0.0, due - time.monotonic()))
            group = None if received is None else self._accept(*received)
            if time.monotonic() >= due:
                idle()
                due = time.monotonic() + idle_every_seconds
            if group is not None:
                yield group

    def release(self, group_ids: Sequence[str]) -> None:
        """Free the rollouts of delivered groups."""
        by_node: dict[int, list[str]] = {}
        for group_id in group_ids:
            node = self._holders.pop(group_id, None)
            if node is not None:
                by_node.setdefault(node, []).append(group_id)
        for node, ids in by_node.items():
            self._send(node, Release(tuple(ids)))

    def stop(self) -> None:
        """Let every collector end."""
        for node in self._hub.nodes:
            self._send(node, Stop())

    def _send(self, node: int, message: ToCollector) -> None:
        """Raises `CollectorLost`; `CollectorFailed` where a collector that is gone had said why,
        unheard so far.
        """
        try:
            self._hub.send(node, message)
        except CollectorLost as lost:
            for sender, said in self._unheard():
                if sender == node and isinstance(said, Failed):
                    raise _failure_of(node, said) from lost
            raise

    def _unheard(self) -> Iterator[tuple[int, FromCollector]]:
        with contextlib.suppress(CollectorLost):
            while (received := self._hub.poll(0)) is not None:
                yield received

    def _accept(self, node: int, message: FromCollector) -> Group | None:
        if isinstance(message, Failed):
            raise _failure_of(node, message)
        if isinstance(message, AbortRequest | EngineLeftOut | EngineBack):
            self._note(message)
            return None
        if not isinstance(message, GroupDone) or message.group.group_id not in self._outstanding:
            raise CollectorFailed(
                f"the collector of node {node} sent an unexpected {type(message).__name__}"
            )
        _, request = self._outstanding.pop(message.group.group_id)
        if not request.evaluation:
            self._holders[message.group.group_id] = node
        self.generated_tokens += message.generated_tokens
        staleness = (
            0 if request.evaluation else self._max_staleness
        )  # what is measured are the weights of now
        return _without_wrong_version(message.group, self._version - staleness, self._version)

    def _note(self, message: AbortRequest | EngineLeftOut | EngineBack) -> None:
        text = ""
        match message:
            case AbortRequest(url, rid):
                # Not waited for: an engine that is stopped would hold up everything.
                threading.Thread(target=self._try_to_abort, args=(url, rid), daemon=True).start()
            case EngineLeftOut(url, reason):
                self.engines_left_out.add(url)
                text = f"engine {url} is left out until it is healthy again: {reason}"
            case EngineBack(url):
                self.engines_left_out.discard(url)
                text = f"engine {url} is used again"
        if text and self._say is not None:
            self._say(text)

    def _try_to_abort(self, url: str, rid: str) -> None:
        if self._abort is not None:
            with contextlib.suppress(EngineError):  # the collector gives the request up then
                self._abort(url, rid)


def _failure_of(node: int, message: Failed) -> CollectorFailed:
    failed = CollectorRefused if message.refused else CollectorFailed
    return failed(f"the collector of node {node} failed: {message.reason}")


def _without_wrong_version(group: Group, oldest: int, newest: int) -> Group:
    """Reject rollouts any token of which was drawn with a version outside of oldest to newest, by
    reason.
    """

    def fault(rollout: RolloutRef) -> str | None:
        if rollout.versions and rollout.versions[-1] > newest:
            return NEVER_SENT
        return STALE if rollout.versions and rollout.versions[0] < oldest else None

    faults = [fault(rollout) for rollout in group.rollouts]
    if not any(faults):
        return group
    counts, tokens = Counter(group.rejections), Counter(group.rejected_tokens)
    for rollout, reason in zip(group.rollouts, faults, strict=True):
        if reason is not None:
            counts[reason] += 1
            tokens[reason] += rollout.num_generated
    kept = tuple(
        rollout for rollout, reason in zip(group.rollouts, faults, strict=True) if reason is None
    )
    return msgspec.structs.replace(
        group, rollouts=kept, rejections=dict(counts), rejected_tokens=dict(tokens)
    )
