"""The times at which a long wait says what it waits for."""

from __future__ import annotations

import time
from collections.abc import Iterator

FIRST_SECONDS = 10.0
_MAX_INTERVAL_SECONDS = 600.0


def growing_intervals(first_seconds: float = FIRST_SECONDS) -> Iterator[float]:
    """Yield the seconds between reminders: each interval is twice as long as the one before."""
    interval = first_seconds
    while True:
        yield interval
        interval = min(2 * interval, max(first_seconds, _MAX_INTERVAL_SECONDS))


class Reminder:
    """Becomes due some seconds after it was made, and again at growing intervals."""

    def __init__(self, first_seconds: float = FIRST_SECONDS) -> None:
        self._start = time.monotonic()
        self._intervals = growing_intervals(first_seconds)
        self._due = self._start + next(self._intervals)

    @property
    def seconds(self) -> float:
        """The seconds since this object was made."""
        return time.monotonic() - self._start

    def is_due(self) -> bool:
        """Return True once for each time that has come."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + next(self._intervals)
        return True
