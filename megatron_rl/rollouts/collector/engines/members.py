"""The engines of a pool: which of them gets a request, and which gets none after failures."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence, Set
from dataclasses import dataclass

from megatron_rl.contracts.group import NEVER_SENT, STALE
from megatron_rl.rollouts.collector.engines.slots import Slots
from megatron_rl.rollouts.wire.messages import EngineLeftOut, FromCollector
from sglang_bridge.client import GenerateClient, RequestExpired
from sglang_bridge.engine import Engine
from sglang_bridge.errors import RequestFailed
from sglang_bridge.generation import Generation, GenerationRejected

_MAX_CONSECUTIVE_FAILURES = 3  # an engine with this many gets no requests

_log = logging.getLogger(__name__)


class EngineRemoved(Exception):
    """Rank 0 removed the engine while it worked on a request."""


@dataclass(eq=False)
class Member:
    """One engine of the pool.

    failures: number of consecutive failures. last_failure: the last one of these.
    is_left_out: the engine failed, and rank 0 knows it. is_removed: its requests have to go to
    other engines.
    """

    engine: Engine
    client: GenerateClient
    in_flight: int = 0
    failures: int = 0
    last_failure: Exception | None = None
    is_left_out: bool = False
    is_removed: bool = False

    def note_success(self) -> None:
        """Start to count failures anew."""
        self.failures = 0
        self.last_failure = None

    @property
    def load(self) -> float:
        """The requests in flight for each rank of the engine."""
        return self.in_flight / self.engine.tp


class IdleTime:
    """Adds up the seconds in which engines work on no request, as a mean over the engines.

    Without an engine nothing is idle.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._share = 0.0  # of the engines that are idle
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """The idle seconds so far."""
        return self._seconds + self._share * (self._clock() - self._since)

    def note(self, num_idle: int, num_engines: int) -> None:
        """Note how many engines are idle from now on."""
        self._seconds = self.seconds
        self._since = self._clock()
        self._share = num_idle / num_engines if num_engines else 0.0


class Members:
    """The engines of a pool.

    Requests go to the usable engines of the own node. While it has none, they go to engines of
    other nodes.

    node: the own one. open_client: connects to an engine. slots_per_engine: requests in flight.
    report: sends a message to rank 0.
    """

    def __init__(
        self,
        node: int,
        open_client: Callable[[Engine], GenerateClient],
        slots_per_engine: int,
        report: Callable[[FromCollector], Awaitable[None]],
    ) -> None:
        self._node = node
        self._open_client = open_client
        self._slots_per_engine = slots_per_engine
        self._report = report
        self._members: dict[str, Member] = {}  # by URL
        # Of these, since the last change: the usable ones of the own node, and where requests go
        self._own_members: list[Member] = []
        self._usable_members: list[Member] = []
        self._change = asyncio.Event()
        self._idle_time = IdleTime()
        self.slots = Slots()
        self.version: int | None = None  # of the weights that responses have to be of

    @property
    def idle_seconds(self) -> float:
        """The seconds in which the own node's engines worked on no request, as a mean over them."""
        return self._idle_time.seconds

    async def replace(self, engines: Sequence[Engine]) -> None:
        """Have exactly these engines.

        An engine that the pool has already keeps its state, also if it gets no requests. Running
        requests of engines that leave are repeated elsewhere.
        """
        engine_of = {engine.url: engine for engine in engines}
        removed_members = [
            member for url, member in self._members.items() if engine_of.get(url) != member.engine
        ]
        for member in removed_members:
            del self._members[member.engine.url]
            member.is_removed = True
        for url, engine in engine_of.items():
            if url not in self._members:
                self._members[url] = Member(engine, self._open_client(engine))
        self._follow_change()
        for member in removed_members:
            await member.client.close()

    def _follow_change(self) -> None:
        """Choose where requests go, adapt the slots, and let waiting requests choose again."""
        members = [member for member in self._members.values() if not member.is_left_out]
        self._own_members = [member for member in members if member.engine.node == self._node]
        self._usable_members = self._own_members or members
        self.slots.resize(self._slots_per_engine * len(self._usable_members))
        self._note_idle_members()
        self._change.set()
        self._change = asyncio.Event()

    def _note_idle_members(self) -> None:
        members = self._own_members
        self._idle_time.note(sum(not member.in_flight for member in members), len(members))

    def have_others(self, failed_members: Set[Member]) -> bool:
        """Return True if a request can go to an engine that it has not tried."""
        return any(member not in failed_members for member in self._usable_members)

    async def choose(self, failed_members: Set[Member]) -> Member:
        """Return the engine with the fewest requests in flight for each rank, once there is one.

        Engines that failed are chosen again if there is no other.
        """
        while True:
            members = self._usable_members
            candidates = [member for member in members if member not in failed_members] or members
            if candidates:
                return min(candidates, key=lambda member: member.load)
            await self._change.wait()

    @contextlib.contextmanager
    def count_request(self, member: Member) -> Iterator[None]:
        """Count a request that an engine works on."""
        member.in_flight += 1
        self._note_idle_members()
        try:
            yield
        finally:
            member.in_flight -= 1
            self._note_idle_members()

    def require_version(self, generation: Generation) -> None:
        """Raise `GenerationRejected` if other weights sampled the response than rank 0 has sent."""
        if self.version is None:
            return
        versions = generation.weight_versions
        other_versions = [version for version in versions if version != str(self.version)]
        if other_versions:
            reason = NEVER_SENT
            if other_versions[0].isdecimal() and int(other_versions[0]) < self.version:
                reason = STALE
            text = f"the engine serves weight version {versions[-1]} instead of {self.version}"
            rejection = GenerationRejected(reason, text)
            rejection.num_tokens = len(generation.output_ids)
            raise rejection

    async def count_failure(
        self, member: Member, failure: RequestFailed | GenerationRejected
    ) -> None:
        """Count a failure. After too many of them the engine gets no requests.

        Requests that share an HTTP request have the same failure, which counts once.

        An engine that fell silent gets none at once, because the next request would wait as long.
        The last engine still gets requests after responses that cannot be used: with NaN in the
        weights, every engine sends such responses, and the batch has to say so.
        """
        if failure is member.last_failure:
            return
        member.last_failure = failure
        member.failures += 1
        is_silent = isinstance(failure, RequestExpired)
        if member.is_left_out or (member.failures < _MAX_CONSECUTIVE_FAILURES and not is_silent):
            return
        if _is_unusable_response(failure) and not self.have_others({member}):
            return
        _log.warning(
            "%s gets no requests after %d failures in a row: %s",
            member.engine.url,
            member.failures,
            failure,
        )
        await self._leave_out(member, str(failure))

    async def leave_out_busy(self, reason: str) -> None:
        """Leave out the engines that work on requests, and take these away from them."""
        for member in list(self._members.values()):
            if member.in_flight and not member.is_left_out:
                _log.warning("%s gets no requests: %s", member.engine.url, reason)
                await self._leave_out(member, reason)
                member.is_removed = True
                await member.client.close()

    async def _leave_out(self, member: Member, reason: str) -> None:
        """Send an engine nothing more, as long as it is a member."""
        member.is_left_out = True
        self._follow_change()
        await self._report(EngineLeftOut(member.engine.url, reason))

    async def close(self) -> None:
        """Close the connections to all engines."""
        for member in self._members.values():
            await member.client.close()


def _is_unusable_response(failure: RequestFailed | GenerationRejected) -> bool:
    """True if the engine answered, with the current weights, what cannot be used."""
    return isinstance(failure, GenerationRejected) and failure.reason not in (STALE, NEVER_SENT)
