"""Samples one response: its requests, their repetition after failures, and its end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace

from megatron_rl.rollouts.collector.engines.gate import Gate
from megatron_rl.rollouts.collector.engines.members import EngineRemoved, Member, Members
from megatron_rl.rollouts.collector.engines.partial_response import PartialResponse
from megatron_rl.rollouts.wire.messages import Priority
from megatron_rl.rollouts.wire.repetition import RepetitionStop
from sglang_bridge.client import may_succeed_elsewhere
from sglang_bridge.errors import RequestFailed
from sglang_bridge.generation import FinishReason, Generation, GenerationRejected

# Rounds in which all engines are tried again after each of them has failed.
_RETRIES = 2
# A request that was running on so many engines when they failed is not tried on another one. It
# may be the cause.
_MAX_LOST_ENGINES = 5
# A response that was aborted so often without a token, and not by rank 0, is given up.
_MAX_EMPTY_ABORTS = 10
_ABORTED_WITHOUT_ROUTES = "aborted_without_routes"  # a reason to reject tokens
_FIRST_BACKOFF_SECONDS = 0.2
_LAST_BACKOFF_SECONDS = 5.0


class _NotWanted(Exception):
    """Nobody waits for the response any more."""


class _Attempts:
    """The failures of one response's requests.

    rejected_tokens: receives the tokens of answers that cannot be used, by the reason.
    """

    def __init__(self, rejected_tokens: Counter[str]) -> None:
        self.failed_members: set[Member] = set()  # in this round
        self._retries = _RETRIES
        self._rejected_tokens = rejected_tokens
        # Engines that fell silent, lost their connection or were removed while they worked on it
        self._num_lost_engines = 0
        self._num_unusable = 0  # answers that could not be used
        self._num_empty_aborts = 0  # answers without a token that rank 0 did not ask for
        self._backoff_seconds = _FIRST_BACKOFF_SECONDS

    @property
    def are_exhausted(self) -> bool:
        """True if the response may be the reason of its failures."""
        return self._num_unusable > 1 or self._num_lost_engines >= _MAX_LOST_ENGINES

    def note_failure(self, member: Member, failure: RequestFailed | GenerationRejected) -> None:
        """Note a failed request. The engine is tried again once all others have failed."""
        self.failed_members.add(member)
        if isinstance(failure, GenerationRejected):
            self._num_unusable += 1
            self.reject_tokens(failure.reason, failure.num_tokens)
        elif _is_loss(failure):
            self._num_lost_engines += 1

    def note_removed_engine(self) -> None:
        """Note that an engine was removed while it worked on the response."""
        self._num_lost_engines += 1

    def may_abort_again(self) -> bool:
        """Note an abort without a token. Returns False if no further one is allowed."""
        self._num_empty_aborts += 1
        return self._num_empty_aborts < _MAX_EMPTY_ABORTS

    def reject_tokens(self, reason: str, num_tokens: int) -> None:
        """Count tokens that cannot be used."""
        self._rejected_tokens[reason] += num_tokens

    async def start_next_round(self, failure: RequestFailed | GenerationRejected) -> None:
        """Wait before all engines are tried again. Raises `failure` if they must not be.

        A round in which an engine was lost does not count: the engine was at fault.
        """
        is_counted = not _is_loss(failure)
        if self._num_unusable or (is_counted and self._retries <= 0):
            raise failure
        self._retries -= is_counted
        self.failed_members.clear()
        await asyncio.sleep(self._backoff_seconds * random.uniform(0.5, 1.5))
        self._backoff_seconds = min(2 * self._backoff_seconds, _LAST_BACKOFF_SECONDS)


class ResponseSampler:
    """Samples one response.

    response: receives the pieces as they arrive.
    rid: GROUP/ROLLOUT. priority: of its slot. rejected_tokens: as of `_Attempts`.
    is_wanted: if it returns False, nothing more is sent.
    stop: cuts a response off that repeats itself. threads: measure its repetition.
    """

    def __init__(
        self,
        response: PartialResponse,
        members: Members,
        gate: Gate,
        *,
        rid: str,
        priority: Priority,
        return_routes: bool,
        seed: int | None,
        is_wanted: Callable[[], bool],
        stop: RepetitionStop | None,
        rejected_tokens: Counter[str],
        threads: Executor | None,
    ) -> None:
        self._response = response
        self._members = members
        self._gate = gate
        self._rid = rid
        self._group = rid.rpartition("/")[0]
        self._priority = priority
        self._return_routes = return_routes
        self._seed = seed
        self._is_wanted = is_wanted
        self._stop = stop
        self._attempts = _Attempts(rejected_tokens)
        self._threads = threads

    async def sample(self) -> Generation:
        """Sample the response to its end. Raises `EngineError` and `GenerationRejected`.

        It is requested piece by piece, until it is complete or repeats itself. It keeps its slot
        meanwhile, so that no piece waits behind other responses.

        A response that nobody wants has no end: this waits until it is cancelled. An environment in
        another process may go on for some time after its cancellation, and an exception could make
        it ask again and again.
        """
        response = self._response
        try:
            # A response from a checkpoint may end here, and needs no slot
            if await self._repeats_itself():
                return self._cut_off()
            async with self._members.slots.hold(self._priority):
                while not response.is_complete:
                    piece = await self._next_piece()
                    if self._is_cut(piece):
                        piece = replace(piece, finish_reason=FinishReason.ABORT)
                    elif not self._goes_on(piece):
                        return self._join(piece)
                    response.add(piece)
                    if await self._repeats_itself():
                        return self._cut_off()
                return response.generation()
        except _NotWanted:
            pass
        await asyncio.get_running_loop().create_future()
        raise AssertionError("unreachable")

    async def _repeats_itself(self) -> bool:
        """Measure in a thread: a long response takes milliseconds."""
        response = self._response
        if self._stop is None or not response.pieces or response.is_complete:
            return False
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._stop.ends, response.output_ids)

    def _cut_off(self) -> Generation:
        """Return the response as if it had all tokens that it may have."""
        return replace(self._response.generation(), finish_reason=FinishReason.LENGTH)

    def _join(self, last_piece: Generation) -> Generation:
        """Return the response with its last piece. A single piece stays as the engine sent it."""
        if not self._response.pieces:
            return last_piece
        self._response.add(last_piece)
        return self._response.generation()

    def _limit(self) -> int | None:
        """Return the number of tokens after which the response is measured. None: without end."""
        num_tokens = self._response.num_tokens
        return None if self._stop is None else self._stop.next_check(num_tokens) - num_tokens

    def _is_cut(self, piece: Generation) -> bool:
        """Return True for a piece that ends because of the limit alone."""
        is_at_limit = piece.finish_reason is FinishReason.LENGTH and self._stop is not None
        return is_at_limit and len(piece.output_ids) < self._response.num_remaining

    def _goes_on(self, piece: Generation) -> bool:
        """Return True for an aborted response that goes on.

        Somebody else than rank 0 may abort requests on an engine, too. A response of an engine that
        was silent does not go on: the next piece would take as long.
        """
        if piece.finish_reason is not FinishReason.ABORT or piece.is_expired:
            return False
        if not self._gate.is_open or len(piece.output_ids):
            return True
        return self._attempts.may_abort_again()

    async def _next_piece(self) -> Generation:
        """Request the rest of the response, from one engine after the other until one answers."""
        while True:
            member = await self._wait_for_turn()
            try:
                return self._without_lost_routes(await self._request(member))
            except EngineRemoved:
                self._attempts.note_removed_engine()
                if self._attempts.are_exhausted:
                    raise self._too_many_losses() from None
            except (RequestFailed, GenerationRejected) as failure:
                self._attempts.note_failure(member, failure)
                if not _is_engine_fault(failure) or self._attempts.are_exhausted:
                    raise
                if not self._members.have_others(self._attempts.failed_members):
                    await self._attempts.start_next_round(failure)

    async def _wait_for_turn(self) -> Member:
        """Return an engine once the gate is open. Raises `_NotWanted`."""
        while True:
            await self._gate.wait_until_open()
            member = await self._members.choose(self._attempts.failed_members)
            # It may have been shut while there was no engine
            if self._gate.is_open:
                break
        if self._gate.is_stopped(self._group) or not self._is_wanted():
            raise _NotWanted
        return member

    def _without_lost_routes(self, piece: Generation) -> Generation:
        """Return a piece without its tokens if it lacks routes: what follows would have none.

        SGLang sends tokens without routes if it aborts a request that it had retracted.
        """
        if not self._return_routes or piece.routes is not None:
            return piece
        self._attempts.reject_tokens(_ABORTED_WITHOUT_ROUTES, len(piece.output_ids))
        return replace(
            piece, output_ids=piece.output_ids[:0], logprobs=piece.logprobs[:0], version_spans=()
        )

    async def _request(self, member: Member) -> Generation:
        """Send one request, and count its tokens before it is over."""
        with (
            self._gate.pass_request(member.client, self._group),
            self._members.count_request(member),
        ):
            try:
                piece = await member.client.generate(
                    self._response.input_ids,
                    self._response.next_sampling(self._limit()),
                    rid=self._rid,
                    return_routes=self._return_routes,
                    seed=self._seed,
                    first_route_row=self._response.first_route_row,
                )
                self._members.require_version(piece)
            except (RequestFailed, GenerationRejected) as failure:
                await self._blame(member, failure)
                raise
            self._gate.count_tokens(self._group, len(piece.output_ids))
        member.note_success()
        return piece

    async def _blame(self, member: Member, failure: RequestFailed | GenerationRejected) -> None:
        """Count a failure of an engine. Raises `EngineRemoved` if its removal may be the cause."""
        if isinstance(failure, GenerationRejected):
            self._gate.count_tokens(self._group, failure.num_tokens)
        if not _is_engine_fault(failure):
            return
        if member.is_removed:
            raise EngineRemoved from failure
        await self._members.count_failure(member, failure)

    def _too_many_losses(self) -> RequestFailed:
        return RequestFailed(
            f"{self._rid}: {_MAX_LOST_ENGINES} engines ended or fell silent while they worked on "
            "this request, so it is not sent to another one"
        )


def _is_loss(failure: RequestFailed | GenerationRejected) -> bool:
    """True if the engine gave no answer at all: its connection ended, or it fell silent."""
    return isinstance(failure, RequestFailed) and failure.status is None


def _is_engine_fault(failure: RequestFailed | GenerationRejected) -> bool:
    return isinstance(failure, GenerationRejected) or may_succeed_elsewhere(failure)
