"""A run that was asked to stop, or not, as the parts of rank 0 see it."""

from __future__ import annotations

from collections.abc import Callable


class ScriptedStop:
    """Tells that the run was asked to stop, from the call of `request` on.

    seconds: the time in which the run has to end then. None: there is no limit.
    clock: tells the time that passes.
    """

    def __init__(
        self, seconds: float | None = None, *, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.stop_requested = False
        self._seconds = seconds
        self._clock = clock
        self._start = 0.0

    def request(self) -> None:
        """Ask the run to stop."""
        self.stop_requested = True
        self._start = self._clock()

    @property
    def seconds_to_stop(self) -> float | None:
        if self._seconds is None or not self.stop_requested:
            return None
        return self._seconds - (self._clock() - self._start)
