"""Asks one engine for generations."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace

import aiohttp

from sglang_bridge.errors import RequestFailed
from sglang_bridge.generation import FinishReason, Generation, decode_generation
from sglang_bridge.request import SamplingLike, encode_request

_ABORT_SECONDS = (
    10.0  # for the answer to an aborted request, which comes with the engine's next step
)
_HEALTH_SECONDS = 30.0  # the engine itself takes up to 20 to find out
_REQUEST_AT_FAULT = frozenset({400, 413, 422})

Abort = Callable[[str, str], Awaitable[None]]


class RequestExpired(RequestFailed):
    """The engine fell silent: it answered nobody while a request waited for its deadline."""


class GenerateClient:
    """Speaks to one URL, from one event loop. One call of `generate` is one request.

    route_shape: (hidden layers, top-k) of the model, needed to ask for routes. vocab_size: what its
    tokens must be below. deadline_seconds: how long the engine may answer nobody while a request
    waits; however long its queue and its responses are, an engine that works does not exceed the
    time of one response. abort: called with the URL and the name of a request whose deadline is
    over; what the engine drew until then is kept as a truncated response. Without it, and when a
    call is cancelled, the connection is closed, and the engine aborts within seconds. threads:
    where replies are decoded; None: the event loop's own.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        deadline_seconds: float = 600.0,
        route_shape: tuple[int, int] | None = None,
        vocab_size: int | None = None,
        abort: Abort | None = None,
        threads: Executor | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = _bearer(api_key)
        self._deadline_seconds = deadline_seconds
        self._route_shape = route_shape
        self._vocab_size = vocab_size
        self._abort = abort
        self._threads = threads
        self._session: aiohttp.ClientSession | None = None
        self._requests = itertools.count()
        self._last_answer = -math.inf

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingLike,
        *,
        rid: str,
        return_routes: bool = True,
        seed: int | None = None,
    ) -> Generation:
        """Draw one response. rid: the request's name in the engine's log; repeats get a number of
        their own.

        seed: see `request.encode_request`. Raises `RequestFailed`, `RequestExpired` and
        `GenerationRejected`.
        """
        if return_routes and self._route_shape is None:
            raise ValueError(
                "routes were asked for: GenerateClient needs route_shape=(hidden layers, top-k)"
            )
        # The engine refuses a name it still knows, and aborts all names that start as the one
        # given.
        name = f"{rid}#{next(self._requests)};"
        answer = asyncio.create_task(
            self._post(encode_request(input_ids, sampling, name, return_routes, seed), name)
        )
        try:
            in_time = await self._answered(answer)
            if not in_time:
                await self._cut_off(answer, name)
            pieces = answer.result()
        finally:
            answer.cancel()
        if in_time:
            self._last_answer = asyncio.get_running_loop().time()
        generation = await self._decode(
            pieces, len(input_ids), self._route_shape if return_routes else None
        )
        return generation if in_time else self._truncated(generation, sampling, name, return_routes)

    async def is_up(self) -> bool:
        """Whether the engine answers and, as far as it can tell, generates."""
        try:
            timeout = aiohttp.ClientTimeout(total=_HEALTH_SECONDS)
            async with self._open_session().get(f"{self.url}/health", timeout=timeout) as response:
                return response.status < 500
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> GenerateClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _answered(self, answer: asyncio.Task[list[bytes]]) -> bool:
        """Wait for as long as the engine answers anyone; False once it has been silent for the
        deadline.
        """
        loop = asyncio.get_running_loop()
        start = loop.time()
        while (left := max(start, self._last_answer) + self._deadline_seconds - loop.time()) > 0:
            done, _ = await asyncio.wait({answer}, timeout=left)
            if done:
                return True
        return False

    async def _cut_off(self, answer: asyncio.Task[list[bytes]], name: str) -> None:
        """Have a request aborted and wait for its answer.

        Raises `RequestExpired` when there is none.
        """
        if self._abort is not None:
            await self._abort(self.url, name)
            done, _ = await asyncio.wait({answer}, timeout=_ABORT_SECONDS)
            if done:
                return
        raise self._expired(name)

    def _truncated(
        self, generation: Generation, sampling: SamplingLike, name: str, return_routes: bool
    ) -> Generation:
        """What was drawn of an aborted response; an engine that aborts does not look whether it had
        just ended.
        """
        if generation.finish_reason is not FinishReason.ABORT:
            return generation
        if not len(generation.output_ids) or (return_routes and generation.routes is None):
            raise self._expired(name)
        ended = int(generation.output_ids[-1]) in sampling.stop_token_ids
        return replace(
            generation, finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH
        )

    def _expired(self, name: str) -> RequestExpired:
        return RequestExpired(
            f"{self.url}: nothing was answered for {self._deadline_seconds:.0f} s while {name} waited; see the "
            "engine's log, or raise engine.token_timeout_s"
        )

    async def _decode(
        self, pieces: list[bytes], num_prompt_tokens: int, shape: tuple[int, int] | None
    ) -> Generation:
        """Long responses with routes are tens of megabytes: in a thread they hold up nobody."""

        def decode() -> Generation:
            return decode_generation(
                b"".join(pieces),
                num_prompt_tokens=num_prompt_tokens,
                route_shape=shape,
                vocab_size=self._vocab_size,
            )

        return await asyncio.get_running_loop().run_in_executor(self._threads, decode)

    async def _post(self, request: bytes, name: str) -> list[bytes]:
        """The pieces of the reply's body: putting megabytes together is left to the thread that
        decodes them.
        """
        session = self._open_session()
        try:
            async with session.post(
                f"{self.url}/generate", data=request, headers=self._headers
            ) as response:
                pieces = [piece async for piece in response.content.iter_any()]
        except aiohttp.ClientError as error:
            raise RequestFailed(
                f"{self.url}: {name} lost its connection ({type(error).__name__}: {error})"
            ) from error
        if response.status != 200:
            words = b"".join(pieces)[:500].decode(errors="replace")
            raise RequestFailed(
                f"{self.url}: {name} was answered {response.status}: {words}",
                status=response.status,
            )
        return pieces

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # The engine does the queueing: no limit here, and only its silence ends a request.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )
        return self._session


def _bearer(key: str | None) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    return headers if key is None else {**headers, "Authorization": f"Bearer {key}"}


def may_succeed_elsewhere(failure: RequestFailed) -> bool:
    """Whether the same request could be answered by another engine, or later: not if the request is
    at fault.
    """
    return failure.status not in _REQUEST_AT_FAULT
