"""Aborts the responses of servers, and kills the servers, in turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from launch.studies.faults.servers import ServerKind, ServerPark
from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import RequestFailed

_ABORT_SECONDS = 5.0


class Interrupter:
    """Aborts all responses of every server, and kills one server after another.

    A server is killed only while another one runs. abort_every, kill_every: seconds.
    num_aborts, num_kills: how often it was done.
    """

    def __init__(
        self,
        park: ServerPark,
        kinds: Sequence[ServerKind],
        *,
        abort_every: float,
        kill_every: float,
    ) -> None:
        self._park = park
        self._urls = {kind: park.server(kind).url for kind in kinds}
        self._abort_every = abort_every
        self._kill_every = kill_every
        now = time.monotonic()
        self._next_abort = now + abort_every
        self._next_kill = now + kill_every
        self._starts: dict[ServerKind, Future[object]] = {}
        self._threads = ThreadPoolExecutor(len(kinds))
        self.num_aborts = 0
        self.num_kills = 0

    def step(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        if now >= self._next_abort:
            self._next_abort = now + self._abort_every
            self._abort()
        if now >= self._next_kill:
            self._next_kill = now + self._kill_every
            self._kill()

    def close(self) -> None:
        """Wait for the servers that are starting."""
        self._threads.shutdown()

    @property
    def _running(self) -> list[ServerKind]:
        return [
            kind for kind in self._urls if kind not in self._starts or self._starts[kind].done()
        ]

    def _abort(self) -> None:
        for kind in self._running:
            client = AdminClient(
                Engine(url=self._urls[kind]), self._park.keys, timeout=_ABORT_SECONDS
            )
            try:
                client.abort_all()
            except RequestFailed:  # it was killed a moment ago
                continue
        self.num_aborts += 1

    def _kill(self) -> None:
        """Kill the server that has not been killed for longest, and start it again."""
        running = self._running
        if len(running) < 2:
            return
        kind = running[0]
        self._park.kill(kind)
        self._starts[kind] = self._threads.submit(self._park.server, kind)
        self._urls[kind] = self._urls.pop(kind)  # the last one in the order now
        self.num_kills += 1
