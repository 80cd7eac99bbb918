"""Endings and time limits of the calls of scorers and environments."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SystemExitCalled(Exception):
    """The call raised SystemExit, which must not end the process."""


class Ending(Enum):
    """The ending of a call.

    CANCELLED: it cancelled itself. TIMED_OUT: it was over its limit and ended after its
    cancellation. ABANDONED: it ignored its cancellation, and its process was ended.
    """

    RETURNED = auto()
    RAISED = auto()
    CANCELLED = auto()
    TIMED_OUT = auto()
    ABANDONED = auto()


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The ending of a call. value: what it returned. error: what it raised."""

    ending: Ending
    value: T | None = None
    error: BaseException | None = None


class TimeLimit:
    """Time limit of one call, whose clock begins with `restart`.

    It can pause while the call waits for something else.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._expiry: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._start = 0.0

    @property
    def has_expired(self) -> bool:
        """True once the limit has passed. It then stays so."""
        return self._expiry.done()

    @property
    def seconds(self) -> float:
        """Return how long the clock has run since it began or began again, 0 while it pauses."""
        return 0.0 if self._timer is None else time.monotonic() - self._start

    def restart(self) -> None:
        """Let the whole limit begin again."""
        self.pause()
        if not self.has_expired:
            self._start = time.monotonic()
            self._timer = self._loop.call_later(self._seconds, self._expire)

    def pause(self) -> None:
        """Stop the clock until `restart`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def wait(self, end: asyncio.Future[Any]) -> None:
        """Wait until a future is done or the limit has passed. The clock then stops."""
        try:
            await asyncio.wait({end, self._expiry}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.pause()

    def _expire(self) -> None:
        self._timer = None
        self._expiry.set_result(None)


async def call_with_limit(call: Callable[[], Awaitable[T]], limit: TimeLimit) -> Outcome[T]:
    """Make a call of a class of this project, and return how it ended.

    A call that is over its limit is cancelled. Cancelling this cancels the call.
    """
    task = asyncio.create_task(await_call(call))
    limit.restart()
    try:
        await limit.wait(task)
        if task.done():
            return task.result()
    finally:
        task.cancel()
        await asyncio.wait({task})
    return Outcome(Ending.TIMED_OUT)


async def await_call(call: Callable[[], Awaitable[T]]) -> Outcome[T]:
    """Make a call and return how it ended. A cancellation from outside looks like its own."""
    try:
        return Outcome(Ending.RETURNED, value=await call())
    except asyncio.CancelledError as error:
        return Outcome(Ending.CANCELLED, error=error)
    except SystemExit as error:
        failure = SystemExitCalled(f"sys.exit({error.code!r})")
        return Outcome(Ending.RAISED, error=failure.with_traceback(error.__traceback__))
    except BaseException as error:  # even KeyboardInterrupt is the call's own
        return Outcome(Ending.RAISED, error=error)
