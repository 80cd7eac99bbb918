"""Which of a node's engines a request goes to, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.prompt import Sampling
from sglang_bridge.client import GenerateClient
from sglang_bridge.engine import Engine
from sglang_bridge.generation import Generation

_QUEUE_PER_SLOT = 2  # requests in flight for each that an engine runs at a time: it finds the next one waiting


class EnginePool:
    """Engines of one node behind one `generate`. route_shape: (hidden layers, top-k), needed to ask for routes."""

    def __init__(
        self,
        engines: Sequence[Engine],
        settings: EngineSettings,
        *,
        api_key: str | None,
        route_shape: tuple[int, int] | None,
    ) -> None:
        self._clients = [
            GenerateClient(
                engine.url,
                api_key=api_key,
                deadline_seconds=settings.request_timeout_s,
                retries=settings.retries,
                route_shape=route_shape,
            )
            for engine in engines
        ]
        self._in_flight = [0] * len(self._clients)
        self._slots = asyncio.Semaphore(_QUEUE_PER_SLOT * settings.max_running_requests * len(self._clients))

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, rid: str, return_routes: bool
    ) -> Generation:
        """Draw one response. Raises `EngineError` or `GenerationRejected`."""
        async with self._slots:  # a request's deadline starts when it is sent, not while it waits here
            engine = min(range(len(self._clients)), key=self._in_flight.__getitem__)
            self._in_flight[engine] += 1
            try:
                return await self._clients[engine].generate(token_ids, sampling, rid=rid, return_routes=return_routes)
            finally:
                self._in_flight[engine] -= 1

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
