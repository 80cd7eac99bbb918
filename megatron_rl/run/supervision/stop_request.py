"""Handles signals that ask a run to save a checkpoint and end.

SIGTERM and the first SIGINT (Ctrl-C) set a time limit. A second SIGINT ends the run at once.
SIGUSR1, which Slurm sends as a warning, sets no limit.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StepAborted(Exception):
    """A step that has trained nothing yet was aborted, because the time limit is near."""


class StopRequest:
    """Remembers the first request to stop.

    SIGTERM and SIGINT count as requests only after `accept_signals`: before, there is nothing to
    save. A SIGUSR1 is always remembered, and handled as soon as there is something to save.

    seconds: the time limit after a SIGTERM or SIGINT. signal_name: the first signal, or None.
    is_step_abortable: True while the current step has trained nothing.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._accepts_signals = False
        self._deadline: float | None = None
        self.signal_name: str | None = None
        self.is_step_abortable = False

    def accept_signals(self) -> None:
        """Treat SIGTERM and SIGINT as requests from now on: the run can save."""
        self._accepts_signals = True

    def handle_signal(self, number: int) -> bool:
        """Remember a signal as a request. Returns False when it must end the run at once."""
        with self._lock:
            if number == signal.SIGUSR1:
                self._remember(number)
                return True
            if number not in STOP_SIGNALS or not self._accepts_signals:
                return False
            # A second Ctrl-C ends the run at once
            if number == signal.SIGINT and self.signal_name is not None:
                return False
            # Slurm and torchrun both send SIGTERM: the second one does not extend the limit
            if self._deadline is None:
                self._deadline = self._clock() + self._seconds
            self._remember(number)
            return True

    @property
    def has_expired(self) -> bool:
        """True once the time limit after a SIGTERM has passed."""
        return self._deadline is not None and self._clock() > self._deadline

    @property
    def seconds_left(self) -> float | None:
        """The time that is left after a SIGTERM or SIGINT. None: there is no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def check_deadline(self) -> None:
        """Raise `StepAborted` in a step that has trained nothing, after half of the time limit."""
        if self._deadline is None or not self.is_step_abortable:
            return
        if self._clock() > self._deadline - self._seconds / 2:
            raise StepAborted

    def _remember(self, number: int) -> None:
        self.signal_name = self.signal_name or signal.Signals(number).name
