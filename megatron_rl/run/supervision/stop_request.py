"""Handles signals, and a file, that ask a run to save a checkpoint and end.

`Watchdog` handles the signals, `Saves.exit_if_requested` saves the checkpoint, and
`CheckpointManager.raise_if_stop_requested` ends the run with code 75.

SIGTERM and the first SIGINT (Ctrl-C) set a time limit. A second Ctrl-C ends the run at once: its
ranks receive another SIGINT, or SIGTERM under torchrun.
SIGUSR1, which Slurm sends as a warning, and the file leave the time until the job's end. Without
Slurm they set no limit.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_JOB_END = "SLURM_JOB_END_TIME"  # seconds since 1970
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class WaitAborted(Exception):
    """A wait for rollouts was aborted, because the time limit of a stop request is near."""


class StopRequest:
    """Remembers the first request to stop.

    SIGTERM and SIGINT count as requests only after `accept_signals`: before, there is nothing to
    save. A SIGUSR1 is always remembered, and handled as soon as there is something to save.

    seconds: the time limit after a SIGTERM or SIGINT. seconds_of_job: returns the time until the
    job ends, None if it is not known. signal_name: the first signal, or None.
    is_wait_abortable: True while the run waits for rollouts.
    """

    def __init__(
        self,
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        seconds_of_job: Callable[[], float | None] = lambda: seconds_of_slurm_job(os.environ),
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._seconds_of_job = seconds_of_job
        self._lock = threading.Lock()
        self._accepts_signals = False
        self._has_to_end = False  # at the deadline, by itself
        self._deadline: float | None = None
        self._abort_time = 0.0  # a wait for rollouts ends then
        self._file: Path | None = None
        self._has_aborted = False  # a wait: the file may be removed before the run has ended
        self.signal_name: str | None = None
        self.is_wait_abortable = False

    def watch_file(self, file: Path) -> None:
        """Treat a file as a request once it exists."""
        self._file = file

    def accept_signals(self) -> None:
        """Treat SIGTERM and SIGINT as requests from now on: the run can save."""
        self._accepts_signals = True

    def handle_signal(self, number: int) -> bool:
        """Remember a signal as a request. Returns False when it must end the run at once."""
        with self._lock:
            if number == signal.SIGUSR1:
                self._remember(number)
                self._limit_by_job()
                return True
            if number not in STOP_SIGNALS or not self._accepts_signals:
                return False
            # A second Ctrl-C, for which torchrun sends SIGTERM
            is_second = self.signal_name is not None and number == signal.SIGINT
            if is_second or self.is_interrupted:
                return False
            # Slurm and torchrun both send SIGTERM: the second one does not extend the limit
            if not self._has_to_end:
                self._limit(self._seconds)
                self._has_to_end = True
            self._remember(number)
            return True

    @property
    def source(self) -> str:
        """The signal or the file that asks the run to stop; empty without a request."""
        if self.signal_name is not None:
            return self.signal_name
        if self._file is None or not (self._has_aborted or self._file.exists()):
            return ""
        with self._lock:
            self._limit_by_job()
        return f"the file {self._file.name}"

    @property
    def is_interrupted(self) -> bool:
        """True after a first signal that was SIGINT."""
        return self.signal_name == signal.SIGINT.name

    @property
    def has_expired(self) -> bool:
        """True once the time limit after a SIGTERM or SIGINT has passed."""
        return self._has_to_end and self.seconds_left == 0

    @property
    def seconds_left(self) -> float | None:
        """The time that is left after a request. None: there is no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def check_deadline(self) -> None:
        """Raise `WaitAborted` in a wait for rollouts, after half of the time limit."""
        if not self.is_wait_abortable or not self.source or self._deadline is None:
            return
        if self._clock() > self._abort_time:
            self._has_aborted = True
            raise WaitAborted

    def _limit_by_job(self) -> None:
        seconds = self._seconds_of_job()
        if self._deadline is None and seconds is not None:
            self._limit(seconds)

    def _limit(self, seconds: float) -> None:
        self._abort_time = self._clock() + seconds / 2
        self._deadline = self._clock() + seconds

    def _remember(self, number: int) -> None:
        self.signal_name = self.signal_name or signal.Signals(number).name


def seconds_of_slurm_job(environment: Mapping[str, str]) -> float | None:
    """Return the time until a Slurm job reaches its limit, None outside one or after its limit."""
    end = environment.get(_JOB_END, "")
    seconds = int(end) - time.time() if end.isascii() and end.isdecimal() else 0.0
    return seconds if seconds > 0 else None
