"""A request to stop that leaves time to save: SIGTERM with a limit, Slurm's warning (SIGUSR1)
without one.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

WARNINGS = (signal.SIGTERM, signal.SIGUSR1)


class StepAborted(Exception):
    """There is no time left for a step that has trained nothing yet."""


class StopRequest:
    """Notes the first request. seconds: how long after SIGTERM; `asked`: its name, None while
    nobody asked.

    SIGTERM is only taken as a request once `accept` was called: before, there is nothing to save. A
    warning is always kept, and met when there is.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._accepts = False
        self._deadline: float | None = None
        self.asked: str | None = None
        self.nothing_trained = False  # in the step that is going on: it may be given up

    def accept(self) -> None:
        """From now on the run can save."""
        self._accepts = True

    def take(self, number: int) -> bool:
        """Whether a signal is a request that will be met; False: the run shall end as it stands."""
        with self._lock:
            if number == signal.SIGUSR1:
                self.asked = self.asked or signal.Signals(number).name
                return True
            if number != signal.SIGTERM or not self._accepts:
                return False
            if (
                self._deadline is None
            ):  # Slurm and torchrun both send it: the second one asks for nothing new
                self._deadline = self._clock() + self._seconds
            self.asked = self.asked or signal.Signals(number).name
            return True

    @property
    def expired(self) -> bool:
        """Whether the limit after SIGTERM has passed."""
        return self._deadline is not None and self._clock() > self._deadline

    def check_time(self) -> None:
        """Raises `StepAborted` once half of that limit has passed and the step has trained nothing
        yet.
        """
        hurried = self._deadline is not None and self._clock() > self._deadline - self._seconds / 2
        if hurried and self.nothing_trained:
            raise StepAborted
