"""Endings and time limits of the calls of scorers and environments."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto


class Ending(Enum):
    """The ending of a call.

    CANCELLED: it cancelled itself. TIMED_OUT: it was over its limit and ended after its
    cancellation. IGNORED: it was over its limit and ignored its cancellation. LOST: its process
    ended or fell silent twice, and nobody knows why.
    """

    RETURNED = auto()
    RAISED = auto()
    CANCELLED = auto()
    TIMED_OUT = auto()
    IGNORED = auto()
    LOST = auto()


@dataclass(frozen=True)
class Outcome[T]:
    """The ending of a call. value: what it returned. error: what it raised."""

    ending: Ending
    value: T | None = None
    error: BaseException | None = None


async def call_with_limit[T](
    call: Callable[[], Awaitable[T]], seconds: float | None = None
) -> Outcome[T]:
    """Make a call of a class of this project, and return how it ended.

    A call that takes longer than `seconds` is cancelled. Cancelling this cancels the call.
    """
    task = asyncio.create_task(await_call(call))
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
    finally:
        task.cancel()
        await asyncio.wait({task})
    return Outcome(Ending.TIMED_OUT)


async def await_call[T](call: Callable[[], Awaitable[T]]) -> Outcome[T]:
    """Make a call and return how it ended. A cancellation from outside looks like its own."""
    try:
        return Outcome(Ending.RETURNED, value=await call())
    except asyncio.CancelledError as error:
        return Outcome(Ending.CANCELLED, error=error)
    except SystemExit as error:
        # The exit of a class must not end the process
        failure = RuntimeError(f"it called sys.exit({error.code!r})")
        return Outcome(Ending.RAISED, error=failure.with_traceback(error.__traceback__))
    except BaseException as error:  # even KeyboardInterrupt is the call's own
        return Outcome(Ending.RAISED, error=error)
