"""Which of a node's engines a request goes to, and when; what an engine does not answer goes to
another.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.rollouts.messages import AbortRequest, EngineBack, EngineLeftOut, FromCollector
from sglang_bridge.client import GenerateClient, RequestExpired, may_succeed_elsewhere
from sglang_bridge.engine import Engine
from sglang_bridge.errors import RequestFailed
from sglang_bridge.generation import Generation, GenerationRejected

_QUEUE_PER_SLOT = (
    2  # requests in flight for each that an engine runs at a time: it finds the next one waiting
)
_MOST_FAILURES = 3  # in a row, before an engine is left out
_FIRST_BACKOFF_SECONDS, _LAST_BACKOFF_SECONDS = 0.2, 5.0
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 5.0, 60.0

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Member:
    """One engine.

    failures: in a row. pause: seconds that it is left out for after the next of too many.
    """

    client: GenerateClient
    in_flight: int = 0
    failures: int = 0
    left_out: bool = False
    pause: float = _FIRST_PAUSE_SECONDS


@dataclass(frozen=True)
class RequestForm:
    """What all requests share. longest_response: in tokens; engines are given time for one.
    route_shape: (hidden layers, top-k), needed to ask for routes. vocab_size: what tokens must be
    below; None: unknown."""

    api_key: str | None
    longest_response: int
    route_shape: tuple[int, int] | None
    vocab_size: int | None


class EnginePool:
    """Engines of one node behind one `generate`. tell: says what happens to rank 0. threads: decode
    replies.

    An engine that fails several times in a row is left out until it is healthy again, but for the
    last one.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        settings: EngineSettings,
        form: RequestForm,
        tell: Callable[[FromCollector], Awaitable[None]],
        *,
        threads: Executor | None = None,
    ) -> None:
        self._members = [
            _Member(
                GenerateClient(
                    engine.url,
                    api_key=form.api_key,
                    deadline_seconds=settings.request_timeout_s
                    + settings.token_timeout_s * form.longest_response,
                    route_shape=form.route_shape,
                    vocab_size=form.vocab_size,
                    abort=self._abort,
                    threads=threads,
                )
            )
            for engine in engines
        ]
        self._retries = settings.retries
        self._slots = asyncio.Semaphore(
            _QUEUE_PER_SLOT * settings.max_running_requests * len(self._members)
        )
        self._tell = tell
        self._probes: set[asyncio.Task[None]] = set()

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        rid: str,
        return_routes: bool,
        seed: int | None = None,
    ) -> Generation:
        """Draw one response. Raises `EngineError` and `GenerationRejected`.

        Every engine is asked before one is asked again; what came back unusable is drawn once more
        by another.
        """
        async with self._slots:
            tried: set[_Member] = set()
            silent: set[_Member] = set()  # waiting for them once more would take a deadline more
            unusable, retries, backoff = 0, self._retries, _FIRST_BACKOFF_SECONDS
            while True:
                member = self._choose(tried)
                try:
                    return await self._ask(member, token_ids, sampling, rid, return_routes, seed)
                except (RequestFailed, GenerationRejected) as failure:
                    tried.add(member)
                    if isinstance(failure, RequestExpired):
                        silent.add(member)
                    unusable += isinstance(failure, GenerationRejected)
                    if not _engine_at_fault(failure) or unusable > 1:
                        raise
                    if len(tried) < len(self._members):
                        continue
                    if not retries or unusable or len(silent) == len(self._members):
                        raise
                retries, tried = retries - 1, set(silent)
                await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
                backoff = min(2 * backoff, _LAST_BACKOFF_SECONDS)

    async def close(self) -> None:
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        for member in self._members:
            await member.client.close()

    def _choose(self, tried: set[_Member]) -> _Member:
        """The engine with the fewest requests in flight; one that is left out only if all others
        were tried.
        """
        untried = [member for member in self._members if member not in tried]
        return min(untried, key=lambda member: (member.left_out, member.in_flight))

    async def _ask(
        self,
        member: _Member,
        ids: Sequence[int],
        sampling: Sampling,
        rid: str,
        return_routes: bool,
        seed: int | None,
    ) -> Generation:
        member.in_flight += 1
        try:
            generation = await member.client.generate(
                ids, sampling, rid=rid, return_routes=return_routes, seed=seed
            )
        except (RequestFailed, GenerationRejected) as failure:
            if _engine_at_fault(failure):
                await self._count_failure(member, failure)
            raise
        finally:
            member.in_flight -= 1
        member.failures, member.pause = 0, _FIRST_PAUSE_SECONDS
        return generation

    async def _count_failure(self, member: _Member, failure: Exception) -> None:
        member.failures += 1
        others = any(not other.left_out for other in self._members if other is not member)
        if member.left_out or member.failures < _MOST_FAILURES or not others:
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
        await self._tell(EngineLeftOut(member.client.url, str(failure)))

    async def _bring_back(self, member: _Member) -> None:
        """Use an engine again once it says that it is healthy; its next failure leaves it out for
        longer.
        """
        healthy = False
        while not healthy:
            await asyncio.sleep(member.pause)
            member.pause = min(2 * member.pause, _LAST_PAUSE_SECONDS)
            healthy = await member.client.is_up()
        member.left_out, member.failures = False, _MOST_FAILURES - 1
        _log.warning("%s is used again", member.client.url)
        await self._tell(EngineBack(member.client.url))

    async def _abort(self, url: str, rid: str) -> None:
        await self._tell(AbortRequest(url, rid))


def _engine_at_fault(failure: RequestFailed | GenerationRejected) -> bool:
    return isinstance(failure, GenerationRejected) or may_succeed_elsewhere(failure)
