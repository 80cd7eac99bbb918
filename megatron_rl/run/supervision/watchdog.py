"""A thread that handles signals, checks engines and ranks, and ends the process in time."""

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
from megatron_rl.run.supervision.failures import describe_failure, log_tail_of
from megatron_rl.run.supervision.frozen_ranks import RankFrozen
from megatron_rl.run.supervision.local_ranks import LocalRanks
from megatron_rl.run.supervision.stop_request import STOP_SIGNALS, StopRequest
from sglang_bridge.server.process_table import kill, process_tree

_CHECK_SECONDS = 1.0
_POLL_SECONDS = 0.2
_SHUTDOWN_SECONDS = 6.0
_JOIN_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1


class SignalReceived(BaseException):
    """A signal arrived, or the watchdog found a failure. Unwinds the main thread."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Watchdog:
    """Handles the signals of a run while this context is active.

    The main thread may be stuck in a collective, where Python runs no signal handler and nobody
    checks the engines. The thread of the watchdog runs all the same. Once `reporter` has an exit
    code, the process ends with that code within `shutdown_seconds`, even if something hangs.

    stop: receives the signals that leave time to save. None: every signal ends the run at
    once.
    """

    def __init__(
        self,
        reporter: ExitReporter,
        *,
        shutdown_seconds: float = _SHUTDOWN_SECONDS,
        stop: StopRequest | None = None,
    ) -> None:
        self._reporter = reporter
        self._stop = stop
        self._shutdown_seconds = shutdown_seconds
        self._checks: list[Callable[[], None]] = []
        self._is_interruptible = False
        self._deadline: float | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """A signal raises `SignalReceived` in the body, once. The main thread enters this."""
        self._is_interruptible = True
        try:
            yield
        finally:
            self._is_interruptible = False

    def add_check(self, check: Callable[[], None]) -> None:
        """Call `check` about every second. An exception that it raises ends the run."""
        self._checks.append(check)

    @contextlib.contextmanager
    def time_limit(self, seconds: float, failure: Exception) -> Iterator[None]:
        """End the run with `failure` if the body takes longer."""
        deadline = time.monotonic() + seconds

        def check() -> None:
            if time.monotonic() > deadline:
                raise failure

        self.add_check(check)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # `limit_shutdown` has removed it
                self._checks.remove(check)

    def wait_for_check(self, seconds: float) -> None:
        """Wait until a check has found the cause of a failure, for `seconds` at most."""
        deadline = time.monotonic() + seconds
        while self._checks and self._reporter.exit_code is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def limit_shutdown(self, seconds: float) -> None:
        """Stop the checks, and end the process if it still runs after `seconds`."""
        self._checks = []
        self._deadline = time.monotonic() + seconds

    def __enter__(self) -> Watchdog:
        self._read_end, self._write_end = socket.socketpair()
        self._write_end.setblocking(False)
        numbers: list[signal.Signals] = list(SIGNALS)
        if self._stop is not None:
            numbers += [number for number in STOP_SIGNALS if number not in numbers]
        # nohup ignores SIGHUP, and so must the run
        active_numbers = [n for n in numbers if signal.getsignal(n) != signal.SIG_IGN]
        self._previous_handlers = {
            number: signal.signal(number, self._interrupt) for number in active_numbers
        }
        self._previous_fd = signal.set_wakeup_fd(
            self._write_end.fileno(), warn_on_full_buffer=False
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join(_JOIN_SECONDS)  # a check may read a process that the kernel blocks
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._read_end.close()
        self._write_end.close()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """The signal handler of the main thread."""
        if self._stop is not None and number in STOP_SIGNALS:
            # The thread decides, and sends another signal when the run must end
            return
        if self._is_interruptible:
            # Only once: a second signal must not interrupt the cleanup
            self._is_interruptible = False
            raise SignalReceived(number)

    def _watch(self) -> None:
        """The loop of the thread."""
        next_check = 0.0
        while not self._end.is_set():
            for number in self._new_signals():
                self._handle_signal(number)
            if self._stop is not None and self._stop.has_expired:
                self._end_run(signal.SIGTERM)
            if self._reporter.exit_code is not None:
                self._enforce_deadline()
            elif time.monotonic() >= next_check:
                self._run_checks()
                next_check = time.monotonic() + _CHECK_SECONDS

    def _new_signals(self) -> list[int]:
        """The signals since the last call. Waits for a moment if there are none."""
        readable, _, _ = select.select([self._read_end], [], [], _POLL_SECONDS)
        if not readable:
            return []
        return [n for n in self._read_end.recv(64) if n in SIGNALS or n in STOP_SIGNALS]

    def _handle_signal(self, number: int) -> None:
        if self._stop is not None and number in STOP_SIGNALS:
            if not self._stop.handle_signal(number):
                self._end_run(number)
        elif number in SIGNALS:
            self._reporter.report_signal(number)

    def _end_run(self, number: int) -> None:
        """End the run without a checkpoint. The reason is Ctrl-C if that was the first signal."""
        if self._stop is not None and self._stop.is_interrupted:
            number = signal.SIGINT
        self._stop = None
        _wake_main_thread()
        self._reporter.report_signal(number)

    def _run_checks(self) -> None:
        try:
            for check in list(self._checks):
                check()
        except Exception as error:
            code, reason = describe_failure(error)
            self._reporter.report_cause(
                1 if code is None else code, reason, log_tail=log_tail_of(error)
            )
            if isinstance(error, RankFrozen):
                error.kill_processes()
            _wake_main_thread()

    def _enforce_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + self._shutdown_seconds
        if time.monotonic() > self._deadline:
            kill(process_tree(os.getpid())[1:])
            os._exit(self._reporter.exit_code or 0)


def end_with_torchrun(ranks: LocalRanks) -> None:
    """Let the kernel send this process SIGTERM when its torchrun dies.

    Call it within a `Watchdog`. Without torchrun, nothing would end the rank.
    """
    if ranks.agent and sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        # It may have died before that call
        if ranks.is_orphaned:
            os.kill(os.getpid(), signal.SIGTERM)


def _wake_main_thread() -> None:
    """Send SIGTERM to the main thread, which raises `SignalReceived` there."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
