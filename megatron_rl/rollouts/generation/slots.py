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
        self._excess = 0  # slots that holders must not give back

    def add(self, count: int) -> None:
        """Raise the capacity."""
        num_kept = min(count, self._excess)
        self._excess -= num_kept
        for _ in range(count - num_kept):
            self._semaphore.release()

    def remove(self, count: int) -> None:
        """Lower the capacity, at once for free slots and later for held ones."""
        self._excess += count

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
