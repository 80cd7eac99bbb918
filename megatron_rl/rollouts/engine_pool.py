"""Which of a node's engines a request goes to, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megatron_rl.contracts.prompt import Sampling
from megatron_rl.rollouts.messages import EngineEndpoint
from sglang_bridge.client import GenerateClient
from sglang_bridge.generation import Generation


class EnginePool:
    """Engines of one node behind one `generate`. route_shape: (hidden layers, top-k), None: no routes are wanted."""

    def __init__(
        self,
        engines: Sequence[EngineEndpoint],
        *,
        request_timeout_s: float,
        retries: int,
        max_in_flight: int,
        route_shape: tuple[int, int] | None,
    ) -> None:
        self._clients = [
            GenerateClient(
                e.url,
                api_key=e.api_key,
                deadline_seconds=request_timeout_s,
                retries=retries,
                route_shape=route_shape,
            )
            for e in engines
        ]
        self._in_flight = [0] * len(self._clients)
        self._slots = asyncio.Semaphore(max_in_flight * len(self._clients))
        self._want_routes = route_shape is not None
        self._running = asyncio.Event()
        self._running.set()
        self._requests: set[asyncio.Task[Generation]] = set()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        """Draw one response. Raises `EngineError` or `GenerationRejected`."""
        while True:
            await self._running.wait()
            request = asyncio.create_task(self._send(token_ids, sampling, request_id))
            self._requests.add(request)
            try:
                return await request
            except asyncio.CancelledError:
                caller = asyncio.current_task()
                if caller is None or caller.cancelling():  # not a pause: the collector itself is ending
                    request.cancel()
                    raise
            finally:
                self._requests.discard(request)

    def pause(self, *, abort: bool) -> None:
        self._running.clear()
        if abort:
            for request in self._requests:
                request.cancel()

    def resume(self) -> None:
        self._running.set()

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    async def _send(self, token_ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        async with self._slots:  # a request's deadline starts when it is sent, not while it waits here
            engine = min(range(len(self._clients)), key=self._in_flight.__getitem__)
            self._in_flight[engine] += 1
            try:
                return await self._clients[engine].generate(
                    token_ids, sampling, rid=request_id, return_routes=self._want_routes
                )
            finally:
                self._in_flight[engine] -= 1
