"""Bounds the requests in flight. The bound changes with the number of engines."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Slots:
    """A semaphore whose capacity can grow and shrink. It starts with none.

    Holders keep their slots when the capacity shrinks. Fewer slots are then given out again.
    """

    def __init__(self) -> None:
        self._semaphore = asyncio.Semaphore(0)
        self._capacity = 0
        self._excess = 0  # slots that holders must not give back

    def resize(self, capacity: int) -> None:
        """Change the capacity: at once for free slots, and later for slots that are held."""
        change = capacity - self._capacity
        self._capacity = capacity
        num_kept = min(change, self._excess)  # below 0 when the capacity shrinks
        self._excess -= num_kept
        for _ in range(change - num_kept):
            self._semaphore.release()

    async def __aenter__(self) -> None:
        await self._semaphore.acquire()
        while self._excess:
            # This slot was free when the capacity shrank
            self._excess -= 1
            await self._semaphore.acquire()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._excess:
            self._excess -= 1
        else:
            self._semaphore.release()
