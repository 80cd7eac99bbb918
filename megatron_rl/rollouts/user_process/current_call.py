"""The call whose code runs now, in memory that a process shares with its collector.

A call that blocks the event loop can send nothing. The collector reads here which one it is.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Coroutine, Generator
from contextvars import Context, ContextVar
from typing import Any

# The call that the current task works for, 0 for none. Tasks that a call starts inherit it.
CALL: ContextVar[int] = ContextVar("CALL", default=0)
_BYTES = 8


class CurrentCall:
    """The number of a call, 0 for none. descriptor: of the shared memory, which stays open."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _BYTES)
        self._numbers = memoryview(self._memory).cast("Q")

    @classmethod
    def create(cls) -> CurrentCall:
        """Create the memory."""
        descriptor = os.memfd_create("current-call")
        os.ftruncate(descriptor, _BYTES)
        return cls(descriptor)

    def get(self) -> int:
        """Return the call that is running."""
        return self._numbers[0]

    def set(self, call: int) -> None:
        """Write the call that is running."""
        self._numbers[0] = call

    def close(self) -> None:
        """Release the memory. You may call it again."""
        self._numbers.release()
        self._memory.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


class TaskSteps(Coroutine[Any, Any, Any]):
    """Runs a coroutine, and writes during each of its steps for which call it runs.

    A process that was forked in a step, and returns from it, is ended: the event loop is not its
    own.
    """

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], current: CurrentCall, call: int
    ) -> None:
        self._coroutine = coroutine
        self._current = current
        self._call = call
        self._pid = os.getpid()

    def send(self, value: Any) -> Any:
        """Run the next step."""
        self._current.set(self._call)
        try:
            return self._coroutine.send(value)
        finally:
            self._end_step()

    def throw(self, *error: Any) -> Any:
        """Run the next step, which begins with an exception."""
        self._current.set(self._call)
        try:
            return self._coroutine.throw(*error)
        finally:
            self._end_step()

    def close(self) -> None:
        """Close the coroutine."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def _end_step(self) -> None:
        if os.getpid() != self._pid:
            os._exit(70)
        self._current.set(0)


def make_task_factory(current: CurrentCall) -> Any:
    """Return a task factory for an event loop whose tasks tell for which call they run."""

    def make_task(
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any],
        context: Context | None = None,
        **options: Any,
    ) -> asyncio.Task[Any]:
        call = CALL.get() if context is None else context.get(CALL, 0)
        if call:
            coroutine = TaskSteps(coroutine, current, call)
        return asyncio.Task(coroutine, loop=loop, context=context, **options)

    return make_task
