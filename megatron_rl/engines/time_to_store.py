"""The time that a checkpoint has to store open responses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from megatron_rl.rollouts.steps.steps_ahead import SecondsToStop


class TimeToStore:
    """Limits the time for open responses if the run has to stop, also if it learns that meanwhile.

    They get half of the time that is left then: the other half belongs to the checkpoint itself.
    Engines get a third of this half to stop responses, and collectors the rest to store them.
    """

    def __init__(
        self, seconds_to_stop: SecondsToStop, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds_to_stop = seconds_to_stop
        self._clock = clock
        self._hold_deadline: float | None = None
        self._deadline: float | None = None

    def is_over_for_engines(self) -> bool:
        """Return True once engines have no more time to stop responses."""
        self._note_stop_request()
        return self._hold_deadline is not None and self._clock() > self._hold_deadline

    def is_over(self) -> bool:
        """Return True once collectors have no more time to store responses."""
        self._note_stop_request()
        return self._deadline is not None and self._clock() > self._deadline

    def _note_stop_request(self) -> None:
        seconds = self._seconds_to_stop()
        # A request without a limit may get one later: SIGTERM after SIGUSR1
        if self._deadline is None and seconds is not None and math.isfinite(seconds):
            now = self._clock()
            self._hold_deadline = now + seconds / 6
            self._deadline = now + seconds / 2
