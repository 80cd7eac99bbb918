"""Client for generation requests to one engine."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace

import aiohttp

from sglang_bridge.errors import RequestFailed
from sglang_bridge.generation import FinishReason, Generation, GenerationRejected, decode_generation
from sglang_bridge.request import Sampling, encode_request
from sglang_bridge.settings import DEFAULT_KEEP_ALIVE_SECONDS

# The answer to an aborted request comes with the engine's next step. It is not waited for longer
# than the answer to the request itself.
_ABORT_SECONDS = 10.0
# The engine itself takes up to 20 seconds to check its health.
_HEALTH_SECONDS = 30.0
# A request that comes when the server closes its connection is lost, and with it all those on
# connections that were used last at the same time.
_SHARE_OF_KEEP_ALIVE = 0.4
_UNUSED_HEADERS = ("Accept", "Accept-Encoding", "User-Agent")
_REQUEST_AT_FAULT = frozenset({400, 413, 422})
# Decoding so many bytes takes less than a millisecond: too little for another thread.
_SMALL_REPLY_BYTES = 32 * 1024

# The largest parts of a reply: what is in every one, what each output token adds (its id,
# log-probability, text and weight version), and each expert of a route as base64.
_BASE_BYTES = 2**20
_TOKEN_BYTES = 1024
_EXPERT_BYTES = 6

Abort = Callable[[str, str], Awaitable[None]]


class RequestExpired(RequestFailed):
    """The engine fell silent: it answered no request for the whole deadline of this one."""


class GenerateClient:
    """Sends requests to one URL, from one event loop. One call of `generate` is one request.

    route_shape: (hidden layers, top-k) of the model, required for requests that return routes.
    vocab_size: token ids must be below it. threads: decode large replies; None means the event
    loop's own.

    deadline_seconds: how long the engine may answer no request at all while a request waits. A
    working engine does not exceed the time of one response, however long its queue is.

    server_keep_alive_seconds: the time after which the server closes an idle connection. The client
    closes it long before.

    abort: called with the URL and the name of a request whose deadline has passed. The tokens
    sampled until then come back with the finish reason ABORT. Without `abort`, when a call is
    cancelled, and when `close` ends it, the client closes the connection, and the engine aborts the
    request within seconds.
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
        server_keep_alive_seconds: float = DEFAULT_KEEP_ALIVE_SECONDS,
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = _request_headers(api_key)
        self._deadline_seconds = deadline_seconds
        self._route_shape = route_shape
        self._vocab_size = vocab_size
        self._abort = abort
        self._threads = threads
        self._keep_alive_seconds = _SHARE_OF_KEEP_ALIVE * server_keep_alive_seconds
        self._session: aiohttp.ClientSession | None = None
        self._requests = itertools.count()
        self._answers: set[asyncio.Task[list[bytes]]] = set()  # of requests that run
        self._last_answer = -math.inf

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: Sampling,
        *,
        rid: str,
        return_routes: bool = True,
        seed: int | None = None,
        first_route_row: int = 0,
    ) -> Generation:
        """Sample one response.

        rid: the request's name in the engine's log. The client appends a number, so that repeated
        requests differ. seed, first_route_row: see `request.encode_request`.

        Raises `RequestFailed`, `RequestExpired` and `GenerationRejected`.
        """
        if return_routes and self._route_shape is None:
            raise ValueError(
                "return_routes=True: GenerateClient needs route_shape=(hidden layers, top-k)"
            )
        # The engine refuses a name that it still knows, and an abort ends all names with the same
        # beginning.
        name = f"{rid}#{next(self._requests)};"
        body = encode_request(input_ids, sampling, name, return_routes, seed, first_route_row)
        num_rows = len(input_ids) + sampling.max_new_tokens - first_route_row
        max_bytes = self._max_reply_bytes(sampling.max_new_tokens, num_rows if return_routes else 0)
        answer = asyncio.create_task(self._post(body, name, max_bytes))
        self._answers.add(answer)
        try:
            in_time = await self._wait_for_answer(answer)
            if not in_time:
                await self._abort_request(answer, name)
            if answer.cancelled():
                raise RequestFailed(f"{self.url}: the client was closed while {name} waited")
            pieces = answer.result()
        finally:
            answer.cancel()
            self._answers.discard(answer)
        if in_time:
            self._last_answer = asyncio.get_running_loop().time()
        generation = await self._decode(
            pieces,
            len(input_ids),
            self._route_shape if return_routes else None,
            first_route_row,
        )
        if in_time:
            return generation
        return self._after_abort(generation, sampling, name, return_routes)

    async def is_up(self) -> bool:
        """True if the engine answers and, as far as it knows, generates."""
        try:
            timeout = aiohttp.ClientTimeout(total=_HEALTH_SECONDS)
            async with self._open_session().get(f"{self.url}/health", timeout=timeout) as response:
                return response.status < 500
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def close(self) -> None:
        """Close the connections. Requests that run fail with `RequestFailed`."""
        for answer in self._answers:
            answer.cancel()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> GenerateClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _wait_for_answer(self, answer: asyncio.Task[list[bytes]]) -> bool:
        """Wait for as long as the engine answers any request.

        Returns False once the engine has been silent for the deadline.
        """
        loop = asyncio.get_running_loop()
        start = loop.time()
        while True:
            remaining = max(start, self._last_answer) + self._deadline_seconds - loop.time()
            if remaining <= 0:
                return False
            await asyncio.wait({answer}, timeout=remaining)
            if answer.done():
                return True

    async def _abort_request(self, answer: asyncio.Task[list[bytes]], name: str) -> None:
        """Abort a request and wait for its answer.

        Raises `RequestExpired` when there is none.
        """
        if self._abort is not None:
            await self._abort(self.url, name)
            await asyncio.wait({answer}, timeout=min(_ABORT_SECONDS, self._deadline_seconds))
            if answer.done():
                return
        raise self._expiry(name)

    def _after_abort(
        self, generation: Generation, sampling: Sampling, name: str, return_routes: bool
    ) -> Generation:
        """Return the answer to an aborted request. Raises `RequestExpired` without a token.

        If the last token is a stop token, the response is complete: an engine that aborts does not
        check this. Any other response stays aborted. It is not truncated at its token limit.
        """
        if generation.finish_reason is not FinishReason.ABORT:
            return generation
        if not len(generation.output_ids):
            raise self._expiry(name)
        has_routes = generation.routes is not None or not return_routes
        if has_routes and int(generation.output_ids[-1]) in sampling.stop_token_ids:
            return replace(generation, finish_reason=FinishReason.STOP)
        return replace(generation, is_expired=True)

    def _expiry(self, name: str) -> RequestExpired:
        return RequestExpired(
            f"{self.url}: the engine answered no request for {self._deadline_seconds:.0f} s while "
            f"{name} waited; see the engine's log, or raise engine.request_timeout_s"
        )

    async def _decode(
        self,
        pieces: list[bytes],
        num_prompt_tokens: int,
        shape: tuple[int, int] | None,
        first_route_row: int,
    ) -> Generation:
        """Decode a reply: a large one in a thread, because it may have tens of megabytes."""

        def decode() -> Generation:
            return decode_generation(
                b"".join(pieces),
                num_prompt_tokens=num_prompt_tokens,
                route_shape=shape,
                vocab_size=self._vocab_size,
                first_route_row=first_route_row,
            )

        if sum(map(len, pieces)) <= _SMALL_REPLY_BYTES:
            return decode()
        return await asyncio.get_running_loop().run_in_executor(self._threads, decode)

    def _max_reply_bytes(self, num_tokens: int, num_route_rows: int) -> int:
        """The largest size of a reply with so many output tokens and rows of routes."""
        row_bytes = _EXPERT_BYTES * math.prod(self._route_shape or (0,))
        return _BASE_BYTES + _TOKEN_BYTES * num_tokens + row_bytes * num_route_rows

    async def _post(self, request: bytes, name: str, max_bytes: int) -> list[bytes]:
        """Send a request and return the pieces of the reply's body.

        They are joined where they are decoded, because they may be megabytes. Raises
        `GenerationRejected` for a reply of more than `max_bytes`, and `RequestFailed`.
        """
        pieces: list[bytes] = []
        num_bytes = 0
        session = self._open_session()
        try:
            async with session.post(
                f"{self.url}/generate", data=request, headers=self._headers
            ) as response:
                async for piece in response.content.iter_any():
                    pieces.append(piece)
                    num_bytes += len(piece)
                    if num_bytes > max_bytes:  # the connection is closed
                        raise GenerationRejected(
                            "malformed",
                            f"{self.url}: the reply to {name} has more than {max_bytes} bytes, the "
                            "most that its tokens and routes take",
                        )
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
            # The engine queues requests: no limit here, and only the engine's silence ends one.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keep_alive_seconds),
                timeout=aiohttp.ClientTimeout(total=None),
                skip_auto_headers=_UNUSED_HEADERS,
                auto_decompress=False,  # a few bytes could become gigabytes
            )
        return self._session


def _request_headers(key: str | None) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    return headers if key is None else {**headers, "Authorization": f"Bearer {key}"}


def may_succeed_elsewhere(failure: RequestFailed) -> bool:
    """True if another engine, or the same one later, could answer the request.

    False if the request itself is at fault.
    """
    return failure.status not in _REQUEST_AT_FAULT
