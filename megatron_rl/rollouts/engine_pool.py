"""Engines of one node behind one `generate`.

The pool balances requests over the engines, repeats failed ones on other engines, and pauses
engines that keep failing.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.rollouts.messages import AbortRequest, EngineBack, EngineLeftOut, FromCollector
from sglang_bridge.client import GenerateClient, RequestExpired, may_succeed_elsewhere
from sglang_bridge.engine import Engine
from sglang_bridge.errors import RequestFailed
from sglang_bridge.generation import Generation, GenerationRejected

# Requests in flight for each that an engine can run at a time, so that the next one is waiting.
_QUEUE_PER_SLOT = 2
_MAX_CONSECUTIVE_FAILURES = 3  # an engine with this many is left out
_FIRST_BACKOFF_SECONDS = 0.2
_LAST_BACKOFF_SECONDS = 5.0
_FIRST_PAUSE_SECONDS = 5.0
_LAST_PAUSE_SECONDS = 60.0

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Member:
    """One engine of the pool.

    failures: number of consecutive failures.
    pause: seconds between health checks while the engine is left out. Doubles with every check and
    is reset by a response.
    """

    client: GenerateClient
    in_flight: int = 0
    failures: int = 0
    left_out: bool = False
    pause: float = _FIRST_PAUSE_SECONDS


@dataclass
class _Attempts:
    """Attempts of one request.

    members: engines that failed in this round.
    silent: engines that did not answer before their deadline. They get no further attempt, because
    it could take another deadline.
    unusable: number of responses that could not be used.
    rejected_tokens: receives the tokens of these responses, by the reason.
    """

    retries: int
    rejected_tokens: Counter[str]
    members: set[_Member] = field(default_factory=set)
    silent: set[_Member] = field(default_factory=set)
    unusable: int = 0

    def record(self, member: _Member, failure: RequestFailed | GenerationRejected) -> None:
        self.members.add(member)
        if isinstance(failure, RequestExpired):
            self.silent.add(member)
        if isinstance(failure, GenerationRejected):
            self.unusable += 1
            self.rejected_tokens[failure.reason] += failure.num_tokens

    def start_next_round(self) -> None:
        self.retries -= 1
        self.members = set(self.silent)


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

    An engine that fails several times in a row is left out until it is healthy again. The last
    engine is never left out.

    report: sends a message to rank 0.
    threads: decode replies.
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
        deadline = settings.request_timeout_s + settings.token_timeout_s * form.longest_response
        self._members = [
            _Member(
                GenerateClient(
                    engine.url,
                    api_key=form.api_key,
                    deadline_seconds=deadline,
                    route_shape=form.route_shape,
                    vocab_size=form.vocab_size,
                    abort=self._abort,
                    threads=threads,
                )
            )
            for engine in engines
        ]
        self._retries = settings.retries
        num_slots = _QUEUE_PER_SLOT * settings.max_running_requests * len(self._members)
        self._slots = asyncio.Semaphore(num_slots)
        self._report = report
        self._probes: set[asyncio.Task[None]] = set()

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        rid: str,
        return_routes: bool,
        rejected_tokens: Counter[str],
        seed: int | None = None,
    ) -> Generation:
        """Sample one response. Raises `EngineError` and `GenerationRejected`.

        A failed request goes to every other engine before it goes to the same one again. A response
        that cannot be used is sampled once more, by another engine.

        rejected_tokens: receives the tokens of responses that cannot be used, by the reason. The
        tokens of a request without a reply are unknown.
        """
        async with self._slots:
            attempts = _Attempts(self._retries, rejected_tokens)
            backoff = _FIRST_BACKOFF_SECONDS
            while True:
                member = self._choose(attempts.members)
                try:
                    return await self._request(
                        member, token_ids, sampling, rid, return_routes, seed
                    )
                except (RequestFailed, GenerationRejected) as failure:
                    attempts.record(member, failure)
                    if not _is_engine_fault(failure) or attempts.unusable > 1:
                        raise
                    if len(attempts.members) < len(self._members):
                        continue
                    if not self._may_retry(attempts):
                        raise
                attempts.start_next_round()
                await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
                backoff = min(2 * backoff, _LAST_BACKOFF_SECONDS)

    async def close(self) -> None:
        """Close the connections to all engines."""
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        for member in self._members:
            await member.client.close()

    def _may_retry(self, attempts: _Attempts) -> bool:
        """Return True if a further round may succeed after every engine failed."""
        if attempts.unusable or len(attempts.silent) == len(self._members):
            return False
        return attempts.retries > 0

    def _choose(self, failed_members: set[_Member]) -> _Member:
        """Choose the engine with the fewest requests in flight.

        An engine that is left out is chosen only if all others have failed.
        """
        candidates = [member for member in self._members if member not in failed_members]
        return min(candidates, key=lambda member: (member.left_out, member.in_flight))

    async def _request(
        self,
        member: _Member,
        token_ids: Sequence[int],
        sampling: Sampling,
        rid: str,
        return_routes: bool,
        seed: int | None,
    ) -> Generation:
        member.in_flight += 1
        try:
            generation = await member.client.generate(
                token_ids, sampling, rid=rid, return_routes=return_routes, seed=seed
            )
        except (RequestFailed, GenerationRejected) as failure:
            if _is_engine_fault(failure):
                await self._count_failure(member, failure)
            raise
        finally:
            member.in_flight -= 1
        member.failures = 0
        member.pause = _FIRST_PAUSE_SECONDS
        return generation

    async def _count_failure(self, member: _Member, failure: Exception) -> None:
        """Count a failure and leave the engine out after too many of them."""
        member.failures += 1
        has_others = any(not other.left_out for other in self._members if other is not member)
        if member.left_out or member.failures < _MAX_CONSECUTIVE_FAILURES or not has_others:
            return
        member.left_out = True
        probe = asyncio.create_task(self._bring_back(member))
        self._probes.add(probe)
        probe.add_done_callback(self._probes.discard)
        _log.warning(
            "%s is left out after %d failures in a row: %s",
            member.client.url,
            member.failures,
            failure,
        )
        await self._report(EngineLeftOut(member.client.url, str(failure)))

    async def _bring_back(self, member: _Member) -> None:
        """Wait until an engine reports that it is healthy, then use it again.

        Its next failure leaves it out again, for longer.
        """
        is_healthy = False
        while not is_healthy:
            await asyncio.sleep(member.pause)
            member.pause = min(2 * member.pause, _LAST_PAUSE_SECONDS)
            is_healthy = await member.client.is_up()
        member.left_out = False
        member.failures = _MAX_CONSECUTIVE_FAILURES - 1
        _log.warning("%s is used again", member.client.url)
        await self._report(EngineBack(member.client.url))

    async def _abort(self, url: str, rid: str) -> None:
        await self._report(AbortRequest(url, rid))


def _is_engine_fault(failure: RequestFailed | GenerationRejected) -> bool:
    return isinstance(failure, GenerationRejected) or may_succeed_elsewhere(failure)
