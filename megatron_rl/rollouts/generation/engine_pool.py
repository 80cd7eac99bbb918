"""Engines of one node behind one `generate`.

The pool balances requests over the engines and repeats failed ones on other engines. It stops using
an engine that keeps failing, and reports that to rank 0. Rank 0 alone decides which engines belong
to the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.group import NEVER_SENT, STALE
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.rollouts.generation.idle_time import IdleTime
from megatron_rl.rollouts.generation.partial_response import PartialResponse
from megatron_rl.rollouts.generation.slots import Slots
from megatron_rl.rollouts.messages import AbortRequest, EngineLeftOut, FromCollector
from megatron_rl.rollouts.repetition import RepetitionStop
from sglang_bridge.client import GenerateClient, RequestExpired, may_succeed_elsewhere
from sglang_bridge.engine import Engine
from sglang_bridge.errors import RequestFailed
from sglang_bridge.generation import FinishReason, Generation, GenerationRejected
from sglang_bridge.settings import DEFAULT_KEEP_ALIVE_SECONDS, MANAGED_KEEP_ALIVE_SECONDS

# Requests in flight for each that an engine can run at a time, so that the next one is waiting.
_QUEUE_PER_SLOT = 2
_MAX_CONSECUTIVE_FAILURES = 3  # an engine with this many is left out
# A request that was running on so many engines when they failed is not tried on another one. It
# may be the cause.
_MAX_LOST_ENGINES = 5
# A response that was aborted so often without a token, and not by rank 0, is given up.
_MAX_EMPTY_ABORTS = 10
# A request may be on its way to the engine when it is aborted, so it is aborted again.
_ABORT_SECONDS = 0.25
# An engine aborts a request after its forward pass. One that takes so long hangs.
_STOP_SECONDS = 120.0
_ABORTED_WITHOUT_ROUTES = "aborted_without_routes"  # a reason to reject tokens
_FIRST_BACKOFF_SECONDS = 0.2
_LAST_BACKOFF_SECONDS = 5.0

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Member:
    """One engine of the pool.

    num_ranks: those of the engine. failures: number of consecutive failures. left_out: the engine
    failed, and rank 0 knows it.
    removal_event: set once rank 0 has removed the engine.
    """

    client: GenerateClient
    num_ranks: int = 1
    in_flight: int = 0
    failures: int = 0
    left_out: bool = False
    removal_event: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, eq=False)
class _RunningRequest:
    """A request that an engine works on. end: done once its tokens are counted."""

    url: str
    group: str
    end: asyncio.Future[None]


@dataclass(frozen=True)
class _RequestFields:
    """Properties that all requests for one response share. rid: GROUP/ROLLOUT."""

    rid: str
    return_routes: bool
    seed: int | None
    is_wanted: Callable[[], bool]

    def lacks_routes(self, piece: Generation) -> bool:
        """Return True for a piece without the routes that were requested."""
        return self.return_routes and piece.routes is None

    @property
    def group(self) -> str:
        return self.rid.rpartition("/")[0]


class _NotWanted(Exception):
    """Nobody waits for the response any more."""


class _EngineRemoved(Exception):
    """Rank 0 removed the engine while it worked on a request."""


@dataclass
class _Attempts:
    """Attempts of one request.

    members: engines that failed in this round.
    lost_engines: number of engines that fell silent, lost their connection or were removed while
    they worked on the request.
    unusable: number of responses that could not be used.
    empty_aborts: number of answers without a token that rank 0 did not ask for.
    rejected_tokens: receives the tokens of these responses, by the reason.
    """

    retries: int
    rejected_tokens: Counter[str]
    members: set[_Member] = field(default_factory=set)
    lost_engines: int = 0
    unusable: int = 0
    empty_aborts: int = 0
    backoff: float = _FIRST_BACKOFF_SECONDS

    def record(self, member: _Member, failure: RequestFailed | GenerationRejected) -> None:
        self.members.add(member)
        if isinstance(failure, GenerationRejected):
            self.unusable += 1
            self.rejected_tokens[failure.reason] += failure.num_tokens
        elif _is_loss(failure):
            self.lost_engines += 1

    def drop_tokens(self, piece: Generation) -> Generation:
        """Return an aborted piece without its tokens: what follows them has no routes for them.

        SGLang sends tokens without routes if it aborts a request that it had retracted.
        """
        self.rejected_tokens[_ABORTED_WITHOUT_ROUTES] += len(piece.output_ids)
        return replace(
            piece, output_ids=piece.output_ids[:0], logprobs=piece.logprobs[:0], version_spans=()
        )

    @property
    def is_exhausted(self) -> bool:
        """True if the request may be the reason of its failures."""
        return self.unusable > 1 or self.lost_engines >= _MAX_LOST_ENGINES

    def start_next_round(self, *, is_counted: bool) -> None:
        self.retries -= is_counted
        self.members.clear()


@dataclass(frozen=True)
class RequestForm:
    """Properties that all requests share.

    longest_response: in tokens. The deadline of a request allows for a response of this length.
    route_shape: (hidden layers, top-k), needed to request routes.
    vocab_size: upper bound of token ids, None if it is unknown.
    """

    api_key: str | None
    longest_response: int
    route_shape: tuple[int, int] | None
    vocab_size: int | None


class EnginePool:
    """Engines of one node behind one `generate`.

    An engine that fails several times in a row, or that falls silent, gets no further requests
    until rank 0 adds it again. Requests wait while there is no engine: rank 0 limits that time.

    engines: those at the start.
    report: sends a message to rank 0.
    threads: decode large replies, and check responses for repetition.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        settings: EngineSettings,
        form: RequestForm,
        report: Callable[[FromCollector], Awaitable[None]],
        *,
        threads: Executor | None = None,
    ) -> None:
        self._settings = settings
        self._form = form
        self._report = report
        self._threads = threads
        self._members: dict[str, _Member] = {}
        self._slots = Slots()
        self._slots_per_engine = _QUEUE_PER_SLOT * settings.max_running_requests
        self._change = asyncio.Event()
        self._version: int | None = None
        self._gate = asyncio.Event()
        self._gate.set()
        self._num_holds = 0
        self._idle = asyncio.Event()  # no engine works on a request
        self._idle.set()
        self.num_sampled = 0  # tokens that engines have sent
        self._num_sampled_of = Counter[str]()  # the same by group
        self._running: set[_RunningRequest] = set()
        self._stopped_groups: set[str] = set()
        self._idle_time = IdleTime()
        for engine in engines:
            self.add(engine)

    @property
    def idle_seconds(self) -> float:
        """The seconds in which engines worked on no request so far, as a mean over the engines."""
        return self._idle_time.seconds

    def _note_idle_engines(self) -> None:
        members = self._usable_members()
        self._idle_time.note(sum(not member.in_flight for member in members), len(members))

    def set_version(self, version: int) -> None:
        """Use responses of these weights alone, from now on."""
        self._version = version

    def add(self, engine: Engine) -> None:
        """Send requests to an engine from now on. One with the same URL is replaced."""
        self._discard(engine.url)
        deadline = self._settings.request_timeout_s
        deadline += self._settings.token_timeout_s * self._form.longest_response
        client = GenerateClient(
            engine.url,
            api_key=self._form.api_key,
            deadline_seconds=deadline,
            route_shape=self._form.route_shape,
            vocab_size=self._form.vocab_size,
            abort=self._abort,
            threads=self._threads,
            server_keep_alive_seconds=_server_keep_alive_seconds(self._settings),
        )
        self._members[engine.url] = _Member(client, engine.tp)
        self._slots.add(self._slots_per_engine)
        self._note_idle_engines()
        self._announce_change()

    async def remove(self, url: str) -> None:
        """Send no further request to an engine, and repeat its running ones elsewhere."""
        member = self._discard(url)
        if member is not None:
            await member.client.close()

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        rid: str,
        return_routes: bool,
        rejected_tokens: Counter[str],
        seed: int | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
        pieces: list[Generation] | None = None,
        stop: RepetitionStop | None = None,
        num_known_routes: int = 0,
    ) -> Generation:
        """Sample one response. Raises `EngineError` and `GenerationRejected`.

        A failed request goes to every other engine before it goes to the same one again. A response
        that cannot be used is sampled once more, by another engine. A request whose engine ends or
        falls silent is sampled again, with the same seed.

        rid: GROUP/ROLLOUT. rejected_tokens: receives the tokens of responses that cannot be used,
        by the reason. The tokens of a request without a reply are unknown.
        is_wanted: if it returns False, nothing more is sent, and this waits until it is cancelled.
        pieces: what there is of the response already. It receives further pieces as they arrive.
        stop: cuts a response off that repeats itself. Its finish reason is then LENGTH.
        num_known_routes: inputs, from the first, whose routes are left out.
        """
        fields = _RequestFields(rid, return_routes, seed, is_wanted)
        response = PartialResponse(
            token_ids, sampling, [] if pieces is None else pieces, num_known_routes
        )
        attempts = _Attempts(self._settings.retries, rejected_tokens)
        try:
            # It may have been stored while it was looked at
            is_begun = bool(response.pieces) and not response.is_complete
            if is_begun and stop is not None and await self._is_stopped(response, stop):
                return _cut_off(response)
            async with self._slots:
                return await self._extend_and_check(response, stop, fields, attempts)
        except _NotWanted:
            pass
        # An environment in another process may go on for some time after its cancellation. An
        # exception could make it ask again and again.
        await asyncio.get_running_loop().create_future()
        raise AssertionError("unreachable")

    async def _extend_and_check(
        self,
        response: PartialResponse,
        stop: RepetitionStop | None,
        fields: _RequestFields,
        attempts: _Attempts,
    ) -> Generation:
        """Sample a response to its end, or until it is stopped because it repeats itself."""
        while True:
            end = None if stop is None else stop.next_check(response.num_tokens)
            generation = await self._extend(response, end, fields, attempts)
            if generation is not None:
                return generation
            if stop is not None and await self._is_stopped(response, stop):
                return _cut_off(response)

    async def _is_stopped(self, response: PartialResponse, stop: RepetitionStop) -> bool:
        """Measure in a thread: a long response takes milliseconds."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, stop.ends, response.output_ids)

    async def _extend(
        self,
        response: PartialResponse,
        end: int | None,
        fields: _RequestFields,
        attempts: _Attempts,
    ) -> Generation | None:
        """Sample a response to its end, or until it has `end` tokens.

        Returns the whole response, None if some of it is left.
        """
        while not response.is_complete:
            if response.num_tokens == end:
                return None
            await self._gate.wait()
            member = await self._wait_for_member(attempts.members)
            if not self._gate.is_set():
                continue
            self._require_wanted(fields)
            limit = None if end is None else end - response.num_tokens
            piece = await self._try(member, response, limit, fields, attempts)
            if piece is None:
                continue
            if _is_cut(piece, response, limit):
                response.add(replace(piece, finish_reason=FinishReason.ABORT))
                return response.generation() if response.is_complete else None
            if not self._is_interrupted(piece, attempts):
                return _join_last_piece(response, piece)
            response.add(piece)
        return response.generation()

    def _require_wanted(self, fields: _RequestFields) -> None:
        """Raise `_NotWanted` if nothing more is to be sampled for a group."""
        if fields.group in self._stopped_groups or not fields.is_wanted():
            raise _NotWanted

    async def hold(self) -> None:
        """Send no further request until `proceed`, and wait until no engine works on one.

        Requests that an engine aborts meanwhile are continued later. An engine that does not abort
        them within two minutes is left out, and others continue them.
        """
        self._gate.clear()
        self._num_holds += 1
        number = self._num_holds
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), _STOP_SECONDS)
        if number == self._num_holds and not self._gate.is_set():
            await self._leave_out_busy()
        await self._idle.wait()

    async def _leave_out_busy(self) -> None:
        """Leave out the engines that still work on requests, and take these away from them."""
        for member in self._usable_members():
            if member.in_flight:
                reason = f"it still worked on requests {_STOP_SECONDS:g} s after they were aborted"
                _log.warning("%s is left out: %s", member.client.url, reason)
                await self._leave_out(member, reason)
                member.removal_event.set()

    def proceed(self) -> None:
        """Send requests again, and continue the responses that were interrupted."""
        self._gate.set()

    async def stop(self, group: str) -> int:
        """Request nothing more for a group, until `forget`. Its running requests are aborted.

        Returns the number of tokens that engines have sent for it, once no engine works on it.
        """
        self._stopped_groups.add(group)
        # Not those of the next request with this id, if the group is forgotten meanwhile
        while group in self._stopped_groups and (requests := self._requests_of(group)):
            for url in sorted({request.url for request in requests}):
                await self._abort(url, f"{group}/")
            await asyncio.wait([request.end for request in requests], timeout=_ABORT_SECONDS)
        return self._num_sampled_of[group]

    def _requests_of(self, group: str) -> list[_RunningRequest]:
        return [request for request in self._running if request.group == group]

    def forget(self, group: str) -> None:
        """Count nothing for a group. It may be requested again."""
        self._stopped_groups.discard(group)
        self._num_sampled_of.pop(group, None)

    async def close(self) -> None:
        """Close the connections to all engines."""
        for member in self._members.values():
            await member.client.close()

    async def _try(
        self,
        member: _Member,
        response: PartialResponse,
        limit: int | None,
        fields: _RequestFields,
        attempts: _Attempts,
    ) -> Generation | None:
        """Request the rest of a response from one engine.

        Returns None if another attempt may follow. Raises `EngineError` and `GenerationRejected`.
        """
        try:
            piece = await self._request(member, response, limit, fields)
            return attempts.drop_tokens(piece) if fields.lacks_routes(piece) else piece
        except _EngineRemoved:
            attempts.lost_engines += 1
            if attempts.is_exhausted:
                raise _too_many_losses(fields.rid) from None
        except (RequestFailed, GenerationRejected) as failure:
            attempts.record(member, failure)
            if not _is_engine_fault(failure) or attempts.is_exhausted:
                raise
            if not self._has_others(attempts.members):
                await self._start_next_round(attempts, failure)
        return None

    def _is_interrupted(self, piece: Generation, attempts: _Attempts) -> bool:
        """Return True for an aborted response that goes on.

        Somebody else than rank 0 may abort requests on an engine, too. A response of an engine that
        was silent does not go on: the next piece would take as long.
        """
        if piece.finish_reason is not FinishReason.ABORT or piece.is_expired:
            return False
        if not self._gate.is_set() or len(piece.output_ids):
            return True
        attempts.empty_aborts += 1
        return attempts.empty_aborts < _MAX_EMPTY_ABORTS

    async def _start_next_round(
        self, attempts: _Attempts, failure: RequestFailed | GenerationRejected
    ) -> None:
        """Wait before all engines are tried again. Raises `failure` if they must not be.

        A round in which an engine was lost does not count: the engine was at fault.
        """
        is_counted = not _is_loss(failure)
        if attempts.unusable or (is_counted and attempts.retries <= 0):
            raise failure
        attempts.start_next_round(is_counted=is_counted)
        await asyncio.sleep(attempts.backoff * random.uniform(0.5, 1.5))
        attempts.backoff = min(2 * attempts.backoff, _LAST_BACKOFF_SECONDS)

    def _has_others(self, failed_members: set[_Member]) -> bool:
        return any(member not in failed_members for member in self._usable_members())

    def _usable_members(self) -> list[_Member]:
        return [member for member in self._members.values() if not member.left_out]

    async def _wait_for_member(self, failed_members: set[_Member]) -> _Member:
        """Return the engine with the fewest requests in flight for each rank, once there is one."""
        while True:
            members = self._usable_members()
            candidates = [member for member in members if member not in failed_members] or members
            if candidates:
                return min(candidates, key=lambda member: member.in_flight / member.num_ranks)
            await self._change.wait()

    def _announce_change(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def _discard(self, url: str) -> _Member | None:
        member = self._members.pop(url, None)
        if member is not None:
            self._slots.remove(self._slots_per_engine)
            self._note_idle_engines()
            member.removal_event.set()
        return member

    async def _request(
        self,
        member: _Member,
        response: PartialResponse,
        limit: int | None,
        fields: _RequestFields,
    ) -> Generation:
        with self._count_request(member, fields.group):
            generation = await self._answer(member, response, limit, fields)
        member.failures = 0
        return generation

    @contextlib.contextmanager
    def _count_request(self, member: _Member, group: str) -> Iterator[None]:
        """Count a request that an engine works on."""
        end = asyncio.get_running_loop().create_future()
        request = _RunningRequest(member.client.url, group, end)
        member.in_flight += 1
        self._note_idle_engines()
        self._running.add(request)
        self._idle.clear()
        try:
            yield
        finally:
            member.in_flight -= 1
            self._note_idle_engines()
            self._running.remove(request)
            end.set_result(None)
            if not self._running:
                self._idle.set()

    async def _answer(
        self,
        member: _Member,
        response: PartialResponse,
        limit: int | None,
        fields: _RequestFields,
    ) -> Generation:
        answer = asyncio.ensure_future(
            member.client.generate(
                response.input_ids,
                response.next_sampling(limit),
                rid=fields.rid,
                return_routes=fields.return_routes,
                seed=fields.seed,
                first_route_row=response.first_route_row,
            )
        )
        removal = asyncio.ensure_future(member.removal_event.wait())
        try:
            await asyncio.wait({answer, removal}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise _EngineRemoved
            generation = answer.result()
            self._require_version(generation)
            self._count_tokens(fields.group, len(generation.output_ids))
        except (RequestFailed, GenerationRejected) as failure:
            if isinstance(failure, GenerationRejected):
                self._count_tokens(fields.group, failure.num_tokens)
            if member.removal_event.is_set() and _is_engine_fault(failure):
                raise _EngineRemoved from failure
            if _is_engine_fault(failure):
                await self._count_failure(member, failure)
            raise
        finally:
            answer.cancel()
            removal.cancel()
        return generation

    def _count_tokens(self, group: str, num_tokens: int) -> None:
        self.num_sampled += num_tokens
        self._num_sampled_of[group] += num_tokens

    def _require_version(self, generation: Generation) -> None:
        """Raise `GenerationRejected` if other weights sampled the response than rank 0 has sent."""
        if self._version is None:
            return
        versions = generation.weight_versions
        other_versions = [version for version in versions if version != str(self._version)]
        if other_versions:
            reason = NEVER_SENT
            if other_versions[0].isdecimal() and int(other_versions[0]) < self._version:
                reason = STALE
            text = f"the engine serves weight version {versions[-1]} instead of {self._version}"
            rejection = GenerationRejected(reason, text)
            rejection.num_tokens = len(generation.output_ids)
            raise rejection

    async def _count_failure(self, member: _Member, failure: Exception) -> None:
        """Count a failure and leave the engine out after too many of them.

        An engine that fell silent is left out at once: the next request would wait as long. The
        last engine is not left out for responses that cannot be used: with NaN in the weights,
        those of every engine are, and the batch has to say so.
        """
        member.failures += 1
        is_silent = isinstance(failure, RequestExpired)
        if member.left_out or (member.failures < _MAX_CONSECUTIVE_FAILURES and not is_silent):
            return
        if _is_unusable_response(failure) and not self._has_others({member}):
            return
        _log.warning(
            "%s is left out after %d failures in a row: %s",
            member.client.url,
            member.failures,
            failure,
        )
        await self._leave_out(member, str(failure))

    async def _leave_out(self, member: _Member, reason: str) -> None:
        """Send an engine nothing more, until rank 0 adds it again."""
        member.left_out = True
        await self._report(EngineLeftOut(member.client.url, reason))

    async def _abort(self, url: str, rid: str) -> None:
        await self._report(AbortRequest(url, rid))


def _is_cut(piece: Generation, response: PartialResponse, limit: int | None) -> bool:
    """Return True for a piece that ends because of `limit` alone."""
    is_at_limit = piece.finish_reason is FinishReason.LENGTH and limit is not None
    return is_at_limit and len(piece.output_ids) < response.num_remaining


def _cut_off(response: PartialResponse) -> Generation:
    """Return a response as if it had all tokens that it may have."""
    return replace(response.generation(), finish_reason=FinishReason.LENGTH)


def _join_last_piece(response: PartialResponse, last_piece: Generation) -> Generation:
    """Return a response with its last piece. One that has no other stays as the engine sent it."""
    if not response.pieces:
        return last_piece
    response.add(last_piece)
    return response.generation()


def _too_many_losses(rid: str) -> RequestFailed:
    return RequestFailed(
        f"{rid}: {_MAX_LOST_ENGINES} engines ended or fell silent while they worked on this "
        "request, so it is not sent to another one"
    )


def _is_unusable_response(failure: Exception) -> bool:
    """True if the engine answered, with the current weights, what cannot be used."""
    return isinstance(failure, GenerationRejected) and failure.reason not in (STALE, NEVER_SENT)


def _is_loss(failure: RequestFailed | GenerationRejected) -> bool:
    """True if the engine gave no answer at all: its connection ended, or it fell silent."""
    return isinstance(failure, RequestFailed) and failure.status is None


def _is_engine_fault(failure: RequestFailed | GenerationRejected) -> bool:
    return isinstance(failure, GenerationRejected) or may_succeed_elsewhere(failure)


def _server_keep_alive_seconds(settings: EngineSettings) -> float:
    """Return after how many seconds a server closes an idle connection."""
    if settings.mode == "managed":
        return MANAGED_KEEP_ALIVE_SECONDS
    return DEFAULT_KEEP_ALIVE_SECONDS
