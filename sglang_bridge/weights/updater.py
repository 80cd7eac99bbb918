"""Weight updates of all engines, which rank 0 leads."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from sglang_bridge.admin import CACHE_TAGS, WEIGHT_TAGS, AdminClient
from sglang_bridge.errors import EngineError, RequestFailed, WeightUpdateFailed
from sglang_bridge.weights.calls import Failures, call_each
from sglang_bridge.weights.crew import Go, Order, Target
from sglang_bridge.weights.part import RankPart, merge_seconds
from sglang_bridge.weights.source import WeightSource


@dataclass(frozen=True)
class UpdateSummary:
    """The costs of an update.

    seconds: of the slowest rank, by part. bytes_sent: by rank and by the engine's URL.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes_sent: Mapping[tuple[int, str], int] = field(default_factory=dict)


class WeightUpdater:
    """Opens and ends the update of every engine, while all owners send.

    No engine serves a mixture: an engine gets the version and goes on only after all owners have
    sent everything and its session has ended. Requests that run during an update are recomputed
    under the new weights.

    An engine that sleeps wakes up in its next update: first its memory for weights, once all ranks
    have freed what they can, and its caches only after the weights have arrived.

    part: rank 0's own part. Each further rank calls `RankPart.follow` at the same time.
    """

    def __init__(self, part: RankPart) -> None:
        self._part = part
        self._transport = part.transport
        self._connections: dict[AdminClient, str] = {}
        self._old_connections: list[str] = []
        # Engines whose last update is complete. Any other may have an open one, because of a
        # failure or of another run.
        self._clean_admins: set[AdminClient] = set()
        self._sleeping_urls: set[str] = set()
        self.summary = UpdateSummary()

    def push(self, source: WeightSource, version: int, admins: Sequence[AdminClient]) -> None:
        """Send engines the weights of all ranks, under Hugging Face names, as `version`.

        A collective. Each rank holds two buckets and one tensor beside its weights.

        Raises `WeightUpdateFailed` after all streams are exhausted. By then, the other engines
        serve the version. Raises `ValueError` if no rank has anything to send.
        """
        update = _Update(admins, self._transport.timeout_seconds)
        self._prepare(update)
        order = self._order(version, update.alive)
        self._connect(update, order, source)
        # Forming groups has a limit of its own
        update.restart_time()
        sleepers = self._wake_weights(update)
        claim = f"updating-{uuid.uuid4().hex[:12]}"
        self._begin(update, version, claim)
        try:
            self._send(update, order, source)
            self._complete(update, version, claim, sleepers)
        except Exception:
            for admin in admins:
                self.forget(admin)
            raise
        for admin in admins:
            if admin.url in update.failures:
                self.forget(admin)
        if update.failures:
            raise WeightUpdateFailed(
                version, update.failures, [admin.url for admin in update.alive]
            )

    def sleep(self, admins: Sequence[AdminClient]) -> None:
        """Let engines give their memory back until their next update. Rank 0 only.

        Raises `EngineError` once all of them have answered, or did not in time.
        """
        awake = [admin for admin in admins if admin.url not in self._sleeping_urls]
        deadline = time.monotonic() + self._transport.timeout_seconds
        failures = call_each(awake, lambda admin: admin.sleep(), deadline=deadline)
        self._sleeping_urls |= {admin.url for admin in awake} - failures.keys()
        if failures:
            reasons = "; ".join(f"{url}: {reason}" for url, reason in failures.items())
            raise EngineError(
                f"engine.colocated=true: {len(failures)} engine(s) did not give their memory to "
                f"the trainer: {reasons}. The run cannot go on beside them; resume it from its "
                "last checkpoint"
            )

    def forget(self, admin: AdminClient) -> None:
        """Drop the connections to an engine that gets no further update from this client.

        The other ranks drop theirs in the next update.
        """
        self._clean_admins.discard(admin)
        self._transport.forget(admin)
        connection = self._connections.pop(admin, None)
        if connection is not None:
            self._old_connections.append(connection)

    def close(self) -> None:
        """Leave every engine."""
        self._part.close()

    def _prepare(self, update: _Update) -> None:
        update.call(lambda admin: admin.pause())
        update.call(self._close_old_session)

    def _order(self, version: int, admins: Sequence[AdminClient]) -> Order:
        """Tell all ranks which engines take part."""
        targets = []
        for admin in admins:
            if admin not in self._connections:
                self._connections[admin] = uuid.uuid4().hex[:12]
                self._part.register(self._connections[admin], admin)
            targets.append(Target(self._connections[admin], admin.engine))
        order = Order(version, tuple(targets), tuple(self._old_connections))
        self._old_connections.clear()
        self._part.crew.tell(msgspec.msgpack.encode(order))
        return order

    def _connect(self, update: _Update, order: Order, source: WeightSource) -> None:
        for rank, readiness in enumerate(self._part.connect(order, source)):
            update.record(_of_rank(rank, readiness.failures))
            update.unit_bytes = max(update.unit_bytes, readiness.unit_bytes)
            if readiness.is_owner:
                update.owners.append(rank)

    def _wake_weights(self, update: _Update) -> frozenset[str]:
        """Wake the memory for weights of engines that sleep; returns their URLs."""
        urls = frozenset(admin.url for admin in update.alive) & self._sleeping_urls
        self._sleeping_urls -= urls
        if urls:
            update.call(lambda admin: _wake(admin, urls, WEIGHT_TAGS))
        return urls

    def _begin(self, update: _Update, version: int, claim: str) -> None:
        """Open the sessions, and mark them as this run's."""
        update.record(self._transport.begin(update.alive, version, update.deadline))
        update.call(lambda admin: admin.set_weight_version(claim))

    def _send(self, update: _Update, order: Order, source: WeightSource) -> None:
        connections = tuple(self._connections[admin] for admin in update.alive)
        seconds = max(update.deadline - time.monotonic(), 0.0)
        go = Go(connections, tuple(update.owners), seconds, update.unit_bytes)
        self._part.crew.tell(msgspec.msgpack.encode(go))
        reports = self._part.send(go, order, source)
        for rank, report in enumerate(reports):
            update.record(_of_rank(rank, report.failures))
        if not sum(report.num_tensors for report in reports) and connections:
            raise ValueError("there are no weights to send")
        self.summary = UpdateSummary(
            merge_seconds(reports),
            {
                (rank, url): count
                for rank, report in enumerate(reports)
                for url, count in report.bytes_sent.items()
            },
        )

    def _complete(
        self, update: _Update, version: int, claim: str, sleepers: frozenset[str]
    ) -> None:
        seconds = dict(self.summary.seconds)
        start = time.monotonic()
        update.record(self._transport.end(update.alive, version, update.deadline))
        update.call(lambda admin: _require_claim(admin, claim))
        update.call(lambda admin: admin.set_weight_version(str(version)))
        seconds["load"] = seconds.get("load", 0.0) + time.monotonic() - start
        start = time.monotonic()
        update.call(lambda admin: admin.flush_cache())
        seconds["flush"] = time.monotonic() - start
        if sleepers:
            update.call(lambda admin: _wake(admin, sleepers, CACHE_TAGS))
        update.call(lambda admin: admin.resume())
        self._clean_admins |= set(update.alive)
        self.summary = UpdateSummary(seconds, self.summary.bytes_sent)

    def _close_old_session(self, admin: AdminClient) -> None:
        """Close the session that a failed update, or a trainer that died, may have left open."""
        if admin not in self._clean_admins:
            with contextlib.suppress(EngineError):  # the engine refuses if no session is open
                admin.end_weight_update()
        self._clean_admins.discard(admin)


class _Update:
    """Engines that still take part in one update, and the ranks that send.

    deadline: by `time.monotonic`.
    """

    def __init__(self, admins: Sequence[AdminClient], timeout_seconds: float) -> None:
        self._admins = admins
        self._timeout_seconds = timeout_seconds
        self.restart_time()
        self.failures: Failures = {}
        self.owners: list[int] = []
        self.unit_bytes = 0

    @property
    def alive(self) -> list[AdminClient]:
        return [admin for admin in self._admins if admin.url not in self.failures]

    def restart_time(self) -> None:
        """Let the engines have the whole time again."""
        self.deadline = time.monotonic() + self._timeout_seconds

    def record(self, failures: Failures) -> None:
        """Keep each engine's first failure."""
        self.failures = failures | self.failures

    def call(self, function: Callable[[AdminClient], None]) -> None:
        """Call a function for every engine that still takes part."""
        self.record(call_each(self.alive, function, deadline=self.deadline))


def _wake(admin: AdminClient, urls: frozenset[str], tags: Sequence[str]) -> None:
    if admin.url in urls:
        admin.wake(tags)


def _of_rank(rank: int, failures: Failures) -> Failures:
    return {
        url: f"from rank {rank}: {reason}" if rank else reason for url, reason in failures.items()
    }


def _require_claim(admin: AdminClient, claim: str) -> None:
    """Raise `RequestFailed` if another trainer began an update of the engine meanwhile."""
    label = admin.weight_version()
    if label != claim:
        raise RequestFailed(
            f"{admin.url}: its weights are labelled {label!r}, not {claim!r}: another trainer "
            "updates this engine. Give each run engines of its own"
        )
