"""Awaits calls of user-defined classes, and gives up on those that ignore their cancellation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic, TypeVar

from megatron_rl.contracts.plugins import PluginError

# From the cancellation of a call to its abandonment
_GRACE_SECONDS = 5.0

T = TypeVar("T")

_log = logging.getLogger(__name__)


class SystemExitCalled(Exception):
    """The call raised SystemExit, which must not end the collector."""


class TooManyAbandoned(PluginError):
    """More calls than `rollout.max_abandoned_calls` ignored their cancellation and still run."""


class Ending(Enum):
    """The ending of a call.

    CANCELLED: it cancelled itself. TIMED_OUT: it was over its limit and ended after its
    cancellation. ABANDONED: it ignored its cancellation, and may still run.
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
    """Time limit of one call. It can pause while the call waits for something else."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._expiry: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def has_expired(self) -> bool:
        """True once the limit has passed. It then stays so."""
        return self._expiry.done()

    def restart(self) -> None:
        """Let the whole limit begin again."""
        self.pause()
        if not self.has_expired:
            self._timer = self._loop.call_later(self._seconds, self._expiry.set_result, None)

    def pause(self) -> None:
        """Stop the clock until `restart`."""
        if self._timer is not None:
            self._timer.cancel()

    async def wait(self, task: asyncio.Task[Any]) -> None:
        """Wait until the task is done or the limit has passed."""
        self.restart()
        try:
            await asyncio.wait({task, self._expiry}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.pause()


class UserCalls:
    """Awaits the calls of one user-defined class.

    A call that is over its limit is cancelled. If it still runs after some seconds, it is
    abandoned: nothing waits for it any more, and it counts until it ends.

    name: the key and the name of the class, such as `reward.name=my_reward:Judge`.
    max_abandoned: the number of abandoned calls that may run at a time.
    report: sends a warning to rank 0.
    """

    def __init__(
        self,
        name: str,
        *,
        max_abandoned: int,
        report: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._name = name
        self._max_abandoned = max_abandoned
        self._report = report
        self._running: set[asyncio.Task[Any]] = set()
        self._num_abandoned = 0

    async def run(
        self, call: Callable[[], Awaitable[T]], limit: TimeLimit, *, subject: str = ""
    ) -> Outcome[T]:
        """Make a call and return how it ended.

        subject: what the call works on, for the warning about an abandoned one.
        Raises `TooManyAbandoned`. Cancelling this cancels the call.
        """
        task = asyncio.create_task(_without_system_exit(call))
        try:
            await limit.wait(task)
            if task.done():
                return _outcome(task)
            await _cancel(task)
        except asyncio.CancelledError:
            await _cancel(task)
            raise
        if task.done():
            return Outcome(Ending.TIMED_OUT, error=_outcome(task).error)
        await self._abandon(task, subject)
        return Outcome(Ending.ABANDONED)

    async def _abandon(self, task: asyncio.Task[Any], subject: str) -> None:
        """Count and warn. Nothing waits for the task any more."""
        self._running.add(task)
        task.add_done_callback(self._forget)
        self._num_abandoned += 1
        warning = (
            f"{self._name}: a call ignored its cancellation for {_GRACE_SECONDS:g} s and was "
            f"abandoned ({subject}; number {self._num_abandoned})"
        )
        _log.warning("%s", warning)
        # The 1st, 2nd, 4th, 8th, ... The log of the collector names them all.
        if self._report is not None and self._num_abandoned.bit_count() == 1:
            await self._report(warning)
        if len(self._running) > self._max_abandoned:
            raise TooManyAbandoned(
                f"{self._name}: {len(self._running)} calls on one node ignored their cancellation "
                f"and still run, the last for {subject}; rollout.max_abandoned_calls="
                f"{self._max_abandoned} is the largest number. Let a call end when it is "
                "cancelled: catch Exception, not BaseException, around what it awaits"
            )

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # asyncio logs exceptions that nothing retrieves


async def _without_system_exit(call: Callable[[], Awaitable[T]]) -> T:
    """Make a call. Raises `SystemExitCalled` for SystemExit, which would end the event loop."""
    try:
        return await call()
    except SystemExit as error:
        text = f"sys.exit({error.code!r})"
        raise SystemExitCalled(text).with_traceback(error.__traceback__) from error


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it ends, for some seconds at most."""
    task.cancel()
    await asyncio.wait({task}, timeout=_GRACE_SECONDS)


def _outcome(task: asyncio.Task[T]) -> Outcome[T]:
    """Return the outcome of a task that is done."""
    try:
        error = task.exception()
    except asyncio.CancelledError as cancellation:
        return Outcome(Ending.CANCELLED, error=cancellation)
    if error is not None:
        return Outcome(Ending.RAISED, error=error)
    return Outcome(Ending.RETURNED, value=task.result())
