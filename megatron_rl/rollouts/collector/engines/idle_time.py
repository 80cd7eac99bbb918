"""The time in which engines have nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable


class IdleTime:
    """Adds up the seconds in which engines work on no request, as a mean over the engines.

    Without an engine nothing is idle.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._share = 0.0  # of the engines that are idle
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """The idle seconds so far."""
        return self._seconds + self._share * (self._clock() - self._since)

    def note(self, num_idle: int, num_engines: int) -> None:
        """Note how many engines are idle from now on."""
        self._seconds = self.seconds
        self._since = self._clock()
        self._share = num_idle / num_engines if num_engines else 0.0
