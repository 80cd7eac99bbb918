"""One HTTP request to an engine for one or more responses."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from sglang_bridge.errors import RequestFailed
from sglang_bridge.generation import GenerationRejected
from sglang_bridge.reply_stream import Pieces, ReplyStream
from sglang_bridge.request import GenerateRequest, encode_request

# The largest parts of a reply: what is in every one, what each output token adds (its id,
# log-probability, text and weight version), and each expert of a route as base64.
_BASE_BYTES = 2**20
_TOKEN_BYTES = 1024
_EXPERT_BYTES = 6


@dataclass(eq=False)
class PendingRequest:
    """A request that waits for its answer.

    answer: the pieces of the reply's body. They are joined where they are decoded, because they may
    be megabytes. post: None until the request is sent. is_aborted: the engine was asked to end it.
    is_answered: its reply is there, also if nobody waits for it.
    """

    request: GenerateRequest
    answer: asyncio.Future[Pieces]
    post: Post | None = field(default=None, init=False)
    is_aborted: bool = field(default=False, init=False)
    is_answered: bool = field(default=False, init=False)

    @property
    def is_over(self) -> bool:
        """True if the engine works on the request no longer, or will notice that nobody waits."""
        task = None if self.post is None else self.post.task
        return self.is_answered or task is None or task.done()


class Post:
    """Sends requests in one HTTP request, and gives each its answer as soon as it is there.

    pending_requests: with the same `return_routes` and `first_route_row`.
    route_shape: (hidden layers, top-k).
    task: runs the request. To cancel it closes the connection.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        pending_requests: Sequence[PendingRequest],
        route_shape: tuple[int, int] | None,
    ) -> None:
        self._url = url
        self._headers = headers
        self._pending_requests = pending_requests
        self.task: asyncio.Task[None] | None = None
        self._row_bytes = _EXPERT_BYTES * math.prod(route_shape or (0,))
        for pending in pending_requests:
            pending.post = self

    @property
    def has_several(self) -> bool:
        """True if it sends more than one request."""
        return len(self._pending_requests) > 1

    @property
    def waiting_requests(self) -> list[PendingRequest]:
        """The requests whose answers somebody waits for."""
        return [pending for pending in self._pending_requests if not pending.answer.done()]

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Send the requests and take the answers.

        Raises `RequestFailed` and `GenerationRejected`, which concern all requests that wait.
        """
        body = encode_request(*(pending.request for pending in self._pending_requests))
        try:
            async with session.post(
                f"{self._url}/generate", data=body, headers=self._headers
            ) as response:
                await self._read(response)
        except aiohttp.ClientError as error:
            raise RequestFailed(
                f"{self._url}: {self._names} lost its connection ({type(error).__name__}: {error})"
            ) from error

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        is_stream = self.has_several and response.status == 200
        stream = ReplyStream()
        pieces: Pieces = []
        num_bytes = 0
        max_bytes = self._max_bytes()
        async for piece in response.content.iter_any():
            num_bytes += len(piece)
            if num_bytes > max_bytes:  # the connection is closed
                raise GenerationRejected(
                    "malformed",
                    f"{self._url}: the reply to {self._names} has more than {max_bytes} bytes, the "
                    "most that its tokens and routes take",
                )
            if not is_stream:
                pieces.append(piece)
                continue
            try:
                for index, reply in stream.feed(piece):
                    self._set_answer(index, reply)
            except RequestFailed as refusal:
                words = f"{self._url}: {self._names}: {refusal}"
                raise RequestFailed(words, status=refusal.status) from refusal
        if response.status != 200:
            words = b"".join(pieces)[:500].decode(errors="replace")
            raise RequestFailed(
                f"{self._url}: {self._names} was answered {response.status}: {words}",
                status=response.status,
            )
        if not is_stream:
            self._set_answer(0, pieces)
        elif self.waiting_requests:
            raise RequestFailed(f"{self._url}: {self._names}: the stream ended without all replies")

    def _set_answer(self, index: int, pieces: Pieces) -> None:
        if index >= len(self._pending_requests):
            raise GenerationRejected("malformed", f"{self._url}: a reply has the index {index}")
        pending = self._pending_requests[index]
        pending.is_answered = True
        if not pending.answer.done():  # otherwise nobody waits for it
            pending.answer.set_result(pieces)

    @property
    def _names(self) -> str:
        first, *others = [pending.request.name for pending in self._pending_requests]
        return f"{first} and {len(others)} more" if others else first

    def _max_bytes(self) -> int:
        """The largest size of the replies."""
        requests = [pending.request for pending in self._pending_requests]
        num_tokens = sum(request.sampling.max_new_tokens for request in requests)
        num_rows = sum(request.max_route_rows for request in requests)
        return _BASE_BYTES * len(requests) + _TOKEN_BYTES * num_tokens + self._row_bytes * num_rows
