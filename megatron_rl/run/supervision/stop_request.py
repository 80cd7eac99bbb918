"""Handles signals that ask a run to save a checkpoint and end.

SIGTERM sets a time limit. SIGUSR1, which Slurm sends as a warning, sets none.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StepAborted(Exception):
    """A step that has trained nothing yet was aborted, because the time limit is near."""


class StopRequest:
    """Remembers the first request to stop.

    A SIGTERM counts as a request only after `accept_sigterm`: before, there is nothing to save. A
    SIGUSR1 is always remembered, and handled as soon as there is something to save.

    seconds: the time limit after a SIGTERM. signal_name: the first signal, None before it.
    is_step_abortable: True while the current step has trained nothing.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._accepts_sigterm = False
        self._deadline: float | None = None
        self.signal_name: str | None = None
        self.is_step_abortable = False

    def accept_sigterm(self) -> None:
        """Treat SIGTERM as a request from now on: the run can save."""
        self._accepts_sigterm = True

    def handle_signal(self, number: int) -> bool:
        """Remember a signal as a request. Returns False when it must end the run at once."""
        with self._lock:
            if number == signal.SIGUSR1:
                self._remember(number)
                return True
            if number != signal.SIGTERM or not self._accepts_sigterm:
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

    def check_deadline(self) -> None:
        """Raise `StepAborted` in a step that has trained nothing, after half of the time limit."""
        if self._deadline is None or not self.is_step_abortable:
            return
        if self._clock() > self._deadline - self._seconds / 2:
            raise StepAborted

    def _remember(self, number: int) -> None:
        self.signal_name = self.signal_name or signal.Signals(number).name
