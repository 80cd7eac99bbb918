"""Decides if and when a process that has ended is started again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

_HOUR_SECONDS = 3600.0
_FIRST_DELAY_SECONDS = 1.0
_MAX_DELAY_SECONDS = 60.0
_RESET_SECONDS = 600.0


class Restart(NamedTuple):
    """A start that is allowed.

    delay_seconds: the time until then. number: counts the restarts of the last hour from 1.
    """

    delay_seconds: float
    number: int


class _End(NamedTuple):
    time: float
    reason: str


class RestartBudget:
    """Counts the restarts of one process in the last hour, and spaces them out.

    The delay before a start is 1, 2, 4, ... 60 seconds. Once the process has been healthy for ten
    minutes, it begins with one second again.

    limit: of restarts in an hour. rule: the setting that gives the limit, for people.
    """

    def __init__(
        self, limit: int, *, rule: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit
        self.rule = rule or f"recovery.restarts_per_hour={limit}"
        self._clock = clock
        self._ends: deque[_End] = deque()
        self._delay_seconds = _FIRST_DELAY_SECONDS
        self._healthy_since: float | None = None

    @property
    def limit(self) -> int:
        """The greatest number of restarts in an hour."""
        return self._limit

    @property
    def reasons(self) -> list[str]:
        """The reasons of the ends in the last hour that were followed by a restart."""
        self._forget_old_ends()
        return [end.reason for end in self._ends]

    def note_healthy(self) -> None:
        """Note that the process is healthy from now on. It may be noted repeatedly."""
        if self._healthy_since is None:
            self._healthy_since = self._clock()

    def request(self, reason: str) -> Restart | None:
        """Ask for a restart of the process, which has ended now. Returns None if none is left."""
        self._forget_old_ends()
        if len(self._ends) >= self._limit:
            return None
        now = self._clock()
        if self._healthy_since is not None and now - self._healthy_since >= _RESET_SECONDS:
            self._delay_seconds = _FIRST_DELAY_SECONDS
        self._healthy_since = None
        self._ends.append(_End(now, reason))
        restart = Restart(self._delay_seconds, len(self._ends))
        self._delay_seconds = min(2 * self._delay_seconds, _MAX_DELAY_SECONDS)
        return restart

    def _forget_old_ends(self) -> None:
        first_time = self._clock() - _HOUR_SECONDS
        while self._ends and self._ends[0].time <= first_time:
            self._ends.popleft()
