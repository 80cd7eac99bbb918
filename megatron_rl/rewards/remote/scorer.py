"""Scores responses by an HTTP server, which may be of any program."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Callable

import aiohttp
import msgspec

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards.remote.circuit import Circuit, NoAnswer
from megatron_rl.rewards.scorer import Scorer

_MAX_CALLS = 64
_PATIENCE_SECONDS = 600.0
# Attempts of one call while the server answers others
_MAX_ATTEMPTS = 3
_FIRST_BACKOFF = 0.2  # seconds
_MAX_REPLY_BYTES = 2**20
# Statuses of a server that may answer later
_RETRY_STATUSES = frozenset({408, 425, 429, 502, 503, 504})
_MAX_EXCERPT = 100  # characters of a refusal


class ServerFault(Exception):
    """The server has failed over one request. It may answer others."""


class _Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a server. It may have other keys."""

    reward: float | None
    correctness: float | None = None
    penalty: float = 0.0
    answer: str | None = None
    reason: str = ""
    parts: dict[str, float] = {}


class RemoteScorer(Scorer):
    """Posts each response to a server, and reads its verdict.

    The request and the answer are JSON objects (docs/rewards.md). A request without an answer is
    made again. While the server answers nothing, responses wait for it, up to `patience_s`.

    url: where responses are posted. key: sent as a bearer token. max_calls: requests at a time.
    Raises ValueError for options that cannot be used.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        max_calls: int = _MAX_CALLS,
        patience_s: float = _PATIENCE_SECONDS,
    ) -> None:
        if re.match(r"https?://[^\s/]", url) is None:
            raise ValueError("url must begin with http:// or https:// and a host")
        if max_calls < 1 or not 0 <= patience_s < math.inf:
            raise ValueError("max_calls must be at least 1, and patience_s at least 0")
        self._url = url
        self._key = key
        self._timeout_s: float | None = None
        self._circuit = Circuit(f"the scorer at {url}", patience_s=patience_s)
        self._slots = asyncio.Semaphore(max_calls)
        self._session: aiohttp.ClientSession | None = None

    def prepare(self, *, timeout_s: float, warn: Callable[[str], None]) -> None:
        """Limit each request to so many seconds, and let `warn` get messages for the user."""
        self._timeout_s = timeout_s
        self._circuit.warn = warn

    async def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        """Score one response.

        Raises `NoAnswer` or `ServerFault` without an answer, and ValueError for an answer that
        cannot be used.
        """
        body = msgspec.json.encode(
            {
                "prompt": prompt.text,
                "answer": prompt.answer,
                "task": prompt.task,
                "details": msgspec.Raw(prompt.details.encode() or b"null"),
                "response": text,
                "finish_reason": finish_reason,
            }
        )
        async with self._slots:
            for number in range(_MAX_ATTEMPTS - 1):
                with contextlib.suppress(NoAnswer, ServerFault):
                    return await self._circuit.run(lambda: self._post(body))
                await asyncio.sleep(_FIRST_BACKOFF * 2**number)
            return await self._circuit.run(lambda: self._post(body))

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _post(self, body: bytes) -> Verdict:
        try:
            async with self._open_session().post(
                self._url,
                data=body,
                # A key must not follow to another server
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            ) as response:
                content = await _read(response)
        except aiohttp.ClientError as error:
            raise NoAnswer(f"{type(error).__name__}: {error}") from error
        except TimeoutError as error:
            raise NoAnswer(f"no answer within reward.timeout_s={self._timeout_s}") from error
        if response.status in _RETRY_STATUSES:
            raise NoAnswer(f"status {response.status}")
        if response.status != 200:
            failure = ServerFault if response.status >= 500 else ValueError
            excerpt = content[:_MAX_EXCERPT].decode(errors="replace")
            raise failure(f"{self._url} answers with status {response.status}: {excerpt}")
        return self._read_verdict(content)

    def _read_verdict(self, content: bytes) -> Verdict:
        try:
            reply = msgspec.json.decode(content, type=_Reply)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{self._url} answers with no verdict: {error}") from error
        return Verdict(**msgspec.structs.asdict(reply))

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"Content-Type": "application/json"}
            if self._key is not None:
                headers["Authorization"] = f"Bearer {self._key}"
            self._session = aiohttp.ClientSession(
                headers=headers, connector=aiohttp.TCPConnector(limit=0)
            )
        return self._session


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Read an answer. Raises ValueError for one that is too long."""
    content = bytearray()
    async for chunk in response.content.iter_chunked(2**16):
        content += chunk
        if len(content) > _MAX_REPLY_BYTES:
            raise ValueError(f"{response.url} answers with more than {_MAX_REPLY_BYTES} bytes")
    return bytes(content)
