"""A thread that listens while the main thread works: to signals, to dead engines, and to the clock
once a run ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

from megatron_rl.run.supervision.exit_reporter import SIGNALS, ExitReporter
from megatron_rl.run.supervision.local_ranks import LocalRanks
from megatron_rl.run.supervision.stop_request import WARNINGS, StopRequest
from sglang_bridge.server.process_table import kill, tree

_CHECK_SECONDS = 1.0
_POLL_SECONDS = 0.2
_END_SECONDS = 6.0
_PR_SET_PDEATHSIG = 1


class Stopped(BaseException):
    """A signal came, or the watch found a cause: the main thread unwinds."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Watchdog:
    """A context: within it signals are the run's.

    The main thread may be stuck in a collective, where no signal handler of Python runs and no
    engine is looked at; this thread runs all the same. Once `words` has a code, the process ends
    with it in `end_seconds`, whatever hangs. stop: takes the signals that leave time to save; None:
    each of them ends the run as it stands.
    """

    def __init__(
        self,
        words: ExitReporter,
        *,
        end_seconds: float = _END_SECONDS,
        stop: StopRequest | None = None,
    ) -> None:
        self._words = words
        self._stop = stop
        self._end_seconds = end_seconds
        self._check: Callable[[], None] | None = None
        self._interruptible = False
        self._deadline: float | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="watch", daemon=True)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """The main thread's work: a signal raises `Stopped` in it, once."""
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def look_at(self, check: Callable[[], None]) -> None:
        """Call it about every second from now on; what it raises ends the run."""
        self._check = check

    def await_news(self, seconds: float) -> None:
        """Give a check that is about to find the cause behind an exception the time to do so."""
        deadline = time.monotonic() + seconds
        while self._check is not None and self._words.code is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def allow(self, seconds: float) -> None:
        """The process has so long from now to close."""
        self._check = None
        self._deadline = time.monotonic() + seconds

    def __enter__(self) -> Watchdog:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        known = (*SIGNALS, *(WARNINGS if self._stop is not None else ()))
        heeded = [
            number for number in dict.fromkeys(known) if signal.getsignal(number) != signal.SIG_IGN
        ]  # nohup
        self._previous = {number: signal.signal(number, self._interrupt) for number in heeded}
        self._previous_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._read.close()
        self._write.close()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._stop is not None and number in WARNINGS:
            return  # the thread decides, and signals again where the run shall end
        if self._interruptible:
            self._interruptible = False  # once: a second signal must not cut the clean-up short
            raise Stopped(number)

    def _listen(self) -> None:
        next_check = 0.0
        while not self._done.is_set():
            for number in self._arrived():
                self._heed(number)
            if self._stop is not None and self._stop.expired:
                self._give_up(signal.SIGTERM)
            if self._words.code is not None:
                self._end_in_time()
            elif self._check is not None and time.monotonic() >= next_check:
                self._look(self._check)
                next_check = time.monotonic() + _CHECK_SECONDS

    def _arrived(self) -> list[int]:
        """Signals since the last call, after waiting for a moment."""
        readable, _, _ = select.select([self._read], [], [], _POLL_SECONDS)
        return [n for n in self._read.recv(64) if n in SIGNALS or n in WARNINGS] if readable else []

    def _heed(self, number: int) -> None:
        if self._stop is not None and number in WARNINGS:
            if not self._stop.take(number):
                self._give_up(number)
        elif number in SIGNALS:
            self._words.told_to_stop(number)

    def _give_up(self, number: int) -> None:
        """No time is left to save, or nobody wants it."""
        self._stop = None
        signal.pthread_kill(
            threading.main_thread().ident or 0, signal.SIGTERM
        )  # raises `Stopped` there
        self._words.told_to_stop(number)

    def _look(self, check: Callable[[], None]) -> None:
        from megatron_rl.run.supervision.failures import (
            describe_failure,  # it imports torch, which a run does while it is watched
        )

        try:
            check()
        except Exception as error:
            code, reason = describe_failure(error)
            self._words.cause(1 if code is None else code, reason)
            signal.pthread_kill(
                threading.main_thread().ident or 0, signal.SIGTERM
            )  # wakes it from a system call

    def _end_in_time(self) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + self._end_seconds
        if time.monotonic() > self._deadline:
            kill(tree(os.getpid())[1:])
            os._exit(self._words.code or 0)


def end_with_torchrun(siblings: LocalRanks) -> None:
    """SIGTERM for this process when torchrun dies: its ranks must not train on headless. Within a
    `Watchdog`.
    """
    if siblings.agent and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if siblings.orphaned:  # it died before that
            os.kill(os.getpid(), signal.SIGTERM)
