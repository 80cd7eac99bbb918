"""The one way in which rank 0 waits for collectors."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_rl.records.reminder import Reminder


def never() -> bool:
    """Return False: nothing ends a wait early."""
    return False


class Wait:
    """A wait for messages of collectors, which may be continued for the next one.

    handle: waits for a message for some seconds at most, and handles all that have arrived.
    describe: says what is waited for, given the seconds since the start.
    idle: called about every `idle_every_seconds`, and at the start if `idles_first`.
    timeout_seconds: None for a wait that `idle` limits. has_to_end: asked as often as `idle` is
    called. If it returns True, the time is over.
    log: writes what is waited for at growing intervals.
    """

    def __init__(
        self,
        handle: Callable[[float], None],
        *,
        describe: Callable[[float], str],
        log: Callable[[str], None],
        idle: Callable[[], None] | None = None,
        idle_every_seconds: float = 0.5,
        idles_first: bool = False,
        timeout_seconds: float | None = None,
        has_to_end: Callable[[], bool] = never,
    ) -> None:
        self._handle = handle
        self._describe = describe
        self._log = log
        self._idle = idle
        self._idle_every_seconds = idle_every_seconds
        self._timeout_seconds = timeout_seconds
        self._has_to_end = has_to_end
        self._reminder = Reminder()
        self._idle_due = time.monotonic() + (0.0 if idles_first else idle_every_seconds)

    @property
    def seconds(self) -> float:
        """The seconds since the start."""
        return self._reminder.seconds

    def until(self, condition: Callable[[], bool]) -> bool:
        """Wait until a condition holds. Returns False if the time is over before.

        Raises what `handle` and `idle` raise.
        """
        while not condition():
            if self._is_over():
                return False
            if time.monotonic() >= self._idle_due:
                if self._idle is not None:
                    self._idle()
                self._idle_due = time.monotonic() + self._idle_every_seconds
            # It may handle nothing before the timeout: heartbeats of collectors wake it
            self._handle(max(0.0, self._idle_due - time.monotonic()))
            if self._reminder.is_due() and not condition():
                self._log(self._describe(self.seconds))
        return True

    def _is_over(self) -> bool:
        if self._timeout_seconds is not None and self.seconds > self._timeout_seconds:
            return True
        return self._has_to_end()
