"""A run that was asked to stop, or not, as the parts of rank 0 see it."""

from __future__ import annotations

import math
from collections.abc import Callable


class ScriptedStop:
    """Tells that the run was asked to stop, from the call of `request` on.

    seconds: the time in which the run has to end then. It is called as `SecondsToStop`.
    clock: tells the time that passes.
    """

    def __init__(
        self, seconds: float = math.inf, *, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._is_requested = False
        self._seconds = seconds
        self._clock = clock
        self._start = 0.0

    def request(self) -> None:
        """Ask the run to stop."""
        self._is_requested = True
        self._start = self._clock()

    def __call__(self) -> float | None:
        if not self._is_requested:
            return None
        return self._seconds - (self._clock() - self._start)
