"""Asks one engine for generations."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from typing import Any, Protocol

import aiohttp
import msgspec

from sglang_bridge.errors import RequestFailed
from sglang_bridge.generation import Generation, decode_generation

_FIRST_BACKOFF_SECONDS = 0.2
_LAST_BACKOFF_SECONDS = 5.0
_TRY_LATER = frozenset({408, 429})


class SamplingLike(Protocol):
    """How to draw. Anything with these attributes will do."""

    @property
    def max_new_tokens(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def stop_token_ids(self) -> Sequence[int]: ...


class GenerateClient:
    """Speaks to one URL, from one event loop.

    route_shape: (hidden layers, top-k) of the model, needed to ask for routes. deadline_seconds: per request, retries
    included. retries: on lost connections and on answers that say to try later, with exponential backoff. A request
    that is given up closes its connection, and the engine aborts it within seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        deadline_seconds: float = 600.0,
        retries: int = 2,
        route_shape: tuple[int, int] | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = _bearer(api_key)
        self._deadline_seconds = deadline_seconds
        self._retries = retries
        self._route_shape = route_shape
        self._session: aiohttp.ClientSession | None = None
        self._attempts = itertools.count()

    async def generate(
        self, input_ids: Sequence[int], sampling: SamplingLike, *, rid: str, return_routes: bool = True
    ) -> Generation:
        """Draw one response. rid: the request's name in the engine's log; repeats get a number of their own."""
        if return_routes and self._route_shape is None:
            raise ValueError("routes were asked for: GenerateClient needs route_shape=(hidden layers, top-k)")
        deadline = asyncio.get_running_loop().time() + self._deadline_seconds
        try:
            async with asyncio.timeout_at(deadline):
                body = await self._post_with_retries(input_ids, sampling, rid, return_routes)
        except TimeoutError as error:
            raise RequestFailed(
                f"{self.url}: no answer to {rid} within {self._deadline_seconds:.0f} s; raise engine.request_timeout_s "
                "or lower rollout.max_new_tokens"
            ) from error
        shape = self._route_shape if return_routes else None
        return decode_generation(body, num_prompt_tokens=len(input_ids), route_shape=shape)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> GenerateClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _post_with_retries(
        self, input_ids: Sequence[int], sampling: SamplingLike, rid: str, return_routes: bool
    ) -> bytes:
        backoff = _FIRST_BACKOFF_SECONDS
        for attempts_left in reversed(range(self._retries + 1)):
            # The engine refuses a name it still knows, so each attempt has its own.
            name = f"{rid}#{next(self._attempts)}"
            request = _encode_request(input_ids, sampling, name, return_routes)
            try:
                return await self._post(request, name)
            except RequestFailed as failure:
                if attempts_left == 0 or not _may_retry(failure):
                    raise
            await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
            backoff = min(2 * backoff, _LAST_BACKOFF_SECONDS)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _post(self, request: bytes, name: str) -> bytes:
        session = self._open_session()
        try:
            async with session.post(f"{self.url}/generate", data=request, headers=self._headers) as response:
                body = await response.read()
        except aiohttp.ClientError as error:
            raise RequestFailed(f"{self.url}: {name} lost its connection ({type(error).__name__}: {error})") from error
        if response.status != 200:
            words = body[:500].decode(errors="replace")
            raise RequestFailed(f"{self.url}: {name} was answered {response.status}: {words}", status=response.status)
        return body

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # The engine does the queueing: no limit here, and only the deadline ends a request.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )
        return self._session


def _bearer(key: str | None) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    return headers if key is None else {**headers, "Authorization": f"Bearer {key}"}


def _may_retry(failure: RequestFailed) -> bool:
    return failure.status is None or failure.status >= 500 or failure.status in _TRY_LATER


def _encode_request(input_ids: Sequence[int], sampling: SamplingLike, rid: str, return_routes: bool) -> bytes:
    """The untruncated distribution of design and paper: no top-p, no top-k, no penalty."""
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(input_ids),
        "sampling_params": {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": False,
        },
        "return_logprob": True,
        "return_routed_experts": return_routes,
        "stream": False,
    }
    return msgspec.json.encode(body)
