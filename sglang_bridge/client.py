"""Client for generation requests to one engine."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp

from sglang_bridge.errors import RequestFailed
from sglang_bridge.generation import FinishReason, Generation, GenerationRejected, decode_generation
from sglang_bridge.post import PendingRequest, Post
from sglang_bridge.reply_stream import Pieces
from sglang_bridge.request import GenerateRequest, Sampling
from sglang_bridge.settings import DEFAULT_KEEP_ALIVE_SECONDS

# The answer to an aborted request comes with the engine's next step. It is not waited for longer
# than the answer to the request itself.
_ABORT_SECONDS = 10.0
# An abort that is faster than its request is ignored, so it is repeated, each time after twice as
# long.
_REPEAT_SECONDS = 1.0
# The engine itself takes up to 20 seconds to check its health.
_HEALTH_SECONDS = 30.0
# A request that comes when the server closes its connection is lost, and with it all those on
# connections that were used last at the same time.
_SHARE_OF_KEEP_ALIVE = 0.4
_UNUSED_HEADERS = ("Accept", "Accept-Encoding", "User-Agent")
_REQUEST_AT_FAULT = frozenset({400, 413, 422})
# Decoding so many bytes takes less than a millisecond: too little for another thread.
_SMALL_REPLY_BYTES = 32 * 1024
# The most requests in one HTTP request. More save little, and the engine answers nobody while it
# reads them.
MAX_REQUESTS_TOGETHER = 32

Abort = Callable[[str, Sequence[str]], Coroutine[Any, Any, None]]


class RequestExpired(RequestFailed):
    """The engine fell silent: it answered no request for the whole deadline of this one."""


class GenerateClient:
    """Sends requests to one URL, from one event loop. One call of `generate` is one request.

    Requests that are made at the same moment share an HTTP request. Each has its answer as soon as
    the engine has it.

    route_shape: (hidden layers, top-k) of the model, required for requests that return routes.
    vocab_size: token ids must be below it. threads: decode large replies; None means the event
    loop's own.

    deadline_seconds: how long the engine may answer no request at all while a request waits. A
    working engine does not exceed the time of one response, however long its queue is.

    server_keep_alive_seconds: the time after which the server closes an idle connection. The client
    closes it long before.

    abort: called with the URL and the names of requests that the engine has to end: those whose
    deadline has passed, and those whose calls are cancelled. It is called again for those that the
    engine does not end. The tokens that were sampled until a deadline come back with the finish
    reason ABORT. When nobody waits for any request of a connection, the client closes it, and the
    engine ends them within seconds. Without `abort`, a request goes on while others of its
    connection wait.
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
        # A collector that is started again may ask for the same while the engine still works on it
        self._random_part = secrets.token_hex(8)
        self._requests = itertools.count()
        self._unsent_requests: list[PendingRequest] = []
        self._pending_requests: set[PendingRequest] = set()
        self._tasks: set[asyncio.Task[None]] = set()
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

        rid: the beginning of the request's name in the engine's log. What the client appends makes
        the names of all requests of all clients differ. seed, first_route_row: see
        `GenerateRequest`.

        Raises `RequestFailed`, `RequestExpired` and `GenerationRejected`.
        """
        if return_routes and self._route_shape is None:
            raise ValueError(
                "return_routes=True: GenerateClient needs route_shape=(hidden layers, top-k)"
            )
        request = GenerateRequest(
            name=self._new_name(rid),
            input_ids=input_ids,
            sampling=sampling,
            return_routes=return_routes,
            seed=seed,
            first_route_row=first_route_row,
        )
        pending = self._send(request)
        try:
            in_time = await self._wait_for_answer(pending.answer)
            if not in_time:
                await self._abort_request(pending)
            if pending.answer.cancelled():
                raise RequestFailed(
                    f"{self.url}: the client was closed while {request.name} waited"
                )
            pieces = pending.answer.result()
        finally:
            self._leave(pending)
        if in_time:
            self._last_answer = asyncio.get_running_loop().time()
        generation = await self._decode(pieces, request)
        if in_time:
            return generation
        return self._after_abort(generation, request)

    async def abort(self, beginning: str) -> None:
        """End the running requests whose names start with `beginning`, on the engine too."""
        names = [pending.request.name for pending in self._pending_requests]
        names = [name for name in names if name.startswith(beginning)]
        if names and self._abort is not None:
            await self._abort(self.url, names)

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
        for pending in self._pending_requests:
            pending.answer.cancel()
        for task in self._tasks:
            task.cancel()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> GenerateClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _send(self, request: GenerateRequest) -> PendingRequest:
        """Send a request, together with those that are made at the same moment."""
        loop = asyncio.get_running_loop()
        pending = PendingRequest(request, loop.create_future())
        self._pending_requests.add(pending)
        if not self._unsent_requests:
            loop.call_soon(self._post_unsent)
        self._unsent_requests.append(pending)
        return pending

    def _post_unsent(self) -> None:
        groups = defaultdict[tuple[bool, int], list[PendingRequest]](list)
        for pending in self._unsent_requests:
            if not pending.answer.done():
                request = pending.request
                groups[request.return_routes, request.first_route_row].append(pending)
        self._unsent_requests.clear()
        for group in groups.values():
            for pending_requests in itertools.batched(group, MAX_REQUESTS_TOGETHER):
                self._post(pending_requests)

    def _post(self, pending_requests: Sequence[PendingRequest]) -> None:
        post = Post(self.url, self._headers, pending_requests, self._route_shape)
        post.task = self._start(post.run(self._open_session()))
        post.task.add_done_callback(partial(self._handle_failure, post))

    def _handle_failure(self, post: Post, task: asyncio.Task[None]) -> None:
        """Fail the requests that wait for an HTTP request that has failed, or send them again.

        If one of several may be at fault, and nothing says which, each is sent alone. It has a new
        name: the engine aborts the names of a failed HTTP request two seconds later.
        """
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        may_be_one_s_fault = isinstance(error, GenerationRejected) or (
            isinstance(error, RequestFailed) and not may_succeed_elsewhere(error)
        )
        for pending in post.waiting_requests:
            if may_be_one_s_fault and post.has_several:
                name = self._new_name(pending.request.name.rpartition("#")[0])
                pending.request = replace(pending.request, name=name)
                self._post([pending])
            else:
                pending.answer.set_exception(error)

    def _leave(self, pending: PendingRequest) -> None:
        """Wait for an answer no longer, and let the engine end the request."""
        self._pending_requests.discard(pending)
        answer = pending.answer
        if answer.done():
            if not answer.cancelled():
                answer.exception()  # so that asyncio does not report that nobody reads it
            return
        answer.cancel()
        post = pending.post
        if post is None or post.task is None:
            return
        if not post.waiting_requests:
            post.task.cancel()
        elif self._abort is not None and not pending.is_aborted:
            self._start(self._abort_until_answered(self._abort, pending))

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # so that asyncio does not report that nobody reads it

    def _new_name(self, rid: str) -> str:
        """Return a name that the engine does not know yet.

        It ends with a sign that no number has, because SGLang's scheduler aborts all names with the
        same beginning.
        """
        return f"{rid}#{self._random_part}.{next(self._requests)};"

    async def _wait_for_answer(self, answer: asyncio.Future[Pieces]) -> bool:
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

    async def _abort_request(self, pending: PendingRequest) -> None:
        """Abort a request and wait for its answer.

        Raises `RequestExpired` when there is none.
        """
        if self._abort is not None:
            self._start(self._abort_until_answered(self._abort, pending))
            await asyncio.wait(
                {pending.answer}, timeout=min(_ABORT_SECONDS, self._deadline_seconds)
            )
            if pending.answer.done():
                return
        raise self._expiry(pending.request.name)

    async def _abort_until_answered(self, abort: Abort, pending: PendingRequest) -> None:
        """Abort a request until the engine has answered it, or its connection is closed.

        SGLang ignores the abort of a request that it has not read yet.
        """
        pending.is_aborted = True
        seconds = _REPEAT_SECONDS
        while not pending.is_over:
            await abort(self.url, [pending.request.name])
            await asyncio.sleep(seconds)
            seconds *= 2

    def _after_abort(self, generation: Generation, request: GenerateRequest) -> Generation:
        """Return the answer to an aborted request. Raises `RequestExpired` without a token.

        If the last token is a stop token, the response is complete: an engine that aborts does not
        check this. Any other response stays aborted. It is not truncated at its token limit.
        """
        if generation.finish_reason is not FinishReason.ABORT:
            return generation
        if not len(generation.output_ids):
            raise self._expiry(request.name)
        has_routes = generation.routes is not None or not request.return_routes
        if has_routes and int(generation.output_ids[-1]) in request.sampling.stop_token_ids:
            return replace(generation, finish_reason=FinishReason.STOP)
        return replace(generation, is_expired=True)

    def _expiry(self, name: str) -> RequestExpired:
        return RequestExpired(
            f"{self.url}: the engine answered no request for {self._deadline_seconds:.0f} s while "
            f"{name} waited; see the engine's log, or raise engine.request_timeout_s"
        )

    async def _decode(self, pieces: Pieces, request: GenerateRequest) -> Generation:
        """Decode a reply: a large one in a thread, because it may have tens of megabytes."""

        def decode() -> Generation:
            return decode_generation(
                b"".join(pieces),
                num_prompt_tokens=len(request.input_ids),
                route_shape=self._route_shape if request.return_routes else None,
                vocab_size=self._vocab_size,
                first_route_row=request.first_route_row,
            )

        try:
            if sum(map(len, pieces)) <= _SMALL_REPLY_BYTES:
                return decode()
            return await asyncio.get_running_loop().run_in_executor(self._threads, decode)
        except RequestFailed as refusal:
            words = f"{self.url}: {request.name}: {refusal}"
            raise RequestFailed(words, status=refusal.status) from refusal

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
