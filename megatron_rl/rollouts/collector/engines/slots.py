"""The requests in flight of a pool: their bound, and the order in which responses get a slot."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator

from megatron_rl.rollouts.wire.messages import Priority


class Slots:
    """Bounds the requests in flight. It starts with no slot, and can grow and shrink.

    capacity: how many there are. Holders keep their slots when it shrinks. Fewer slots are then
    given out again.

    Those that wait get slots by their priority, the smallest first, and with the same priority in
    the order in which they have come.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self._num_held = 0
        self._waiters: list[tuple[Priority, int, asyncio.Future[None]]] = []  # a heap
        self._numbers = itertools.count()

    def resize(self, capacity: int) -> None:
        """Change the capacity: at once for free slots, and later for slots that are held."""
        self.capacity = capacity
        self._give_out()

    @contextlib.asynccontextmanager
    async def hold(self, priority: Priority) -> AsyncIterator[None]:
        """Wait for a slot, and hold it."""
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (priority, next(self._numbers), turn))
        self._give_out()
        try:
            await turn
            yield
        finally:
            # One that is cancelled may have its slot already, and has none if its turn is cancelled
            if turn.done() and not turn.cancelled():
                self._num_held -= 1
                self._give_out()

    def _give_out(self) -> None:
        """Give free slots to those that wait."""
        while self._num_held < self.capacity and self._waiters:
            *_, turn = heapq.heappop(self._waiters)
            if not turn.done():
                turn.set_result(None)
                self._num_held += 1
