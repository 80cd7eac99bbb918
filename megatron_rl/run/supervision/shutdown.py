"""Ends the process of a rank: it reports the cause first, then closes within a time limit."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from typing import NoReturn

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.records.write_errors import write_problem
from megatron_rl.run.supervision.exit_reporter import ExitReporter
from megatron_rl.run.supervision.failures import (
    comes_from_engines,
    describe_failure,
    log_tail_of,
)
from megatron_rl.run.supervision.local_ranks import LocalRanks
from megatron_rl.run.supervision.supervision import OpenParts
from megatron_rl.run.supervision.watchdog import SignalReceived, Watchdog

_CHECK_SECONDS = 3.0
_LINGER_SECONDS = 6.0


def report_exception(error: BaseException, reporter: ExitReporter, watchdog: Watchdog) -> None:
    """Report an exception of the main thread, unless another rank or thread knows the cause."""
    if isinstance(error, SignalReceived):
        reporter.report_signal(error.number)
        return
    code, reason = describe_failure(error)
    if comes_from_engines(error):
        # The watchdog may find a dead engine, which explains more than this exception
        watchdog.wait_for_check(_CHECK_SECONDS)
    if code is None:
        reporter.report_cause(1, reason, "".join(traceback.format_exception(error)))
    elif code is ExitCode.PEER_FAILED:
        reporter.report_consequence(code, reason)
    else:
        reporter.report_cause(code, reason, log_tail=log_tail_of(error))


def close_after_success(parts: OpenParts) -> None:
    """Close the parts of a complete run. Errors are printed, and change nothing."""
    try:
        parts.close()
    except Exception as error:
        with contextlib.suppress(OSError, ValueError):
            print(
                f"the run is complete, but closing it failed: {type(error).__name__}: {error}",
                file=sys.stderr,
                flush=True,
            )


def limit_exit(code: int, seconds: float) -> None:
    """End this process with `code` in some seconds, whatever then still runs.

    Python waits for the threads of user-defined classes before it ends.
    """
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()


def exit_process(reporter: ExitReporter, ranks: LocalRanks, parts: OpenParts) -> NoReturn:
    """Close the parts of a failed run and end the process. A `Watchdog` limits the time.

    A rank that has not reported ends after the one that has: torchrun takes the first rank that
    ends as the root cause.
    """
    _silence_stderr()
    with contextlib.suppress(Exception):
        parts.kill_processes()
    deadline = time.monotonic() + _LINGER_SECONDS
    while not reporter.has_reported and ranks.agent and time.monotonic() < deadline:
        if ranks.is_orphaned or ranks.dead_ranks():
            break
        time.sleep(0.1)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(1 if reporter.exit_code is None else reporter.exit_code)


def hide_write_errors(arguments: threading.ExceptHookArgs) -> None:
    """Print the exception of a thread, unless a file could not be written.

    The thread that waits for the file reports that, once. Use this as `threading.excepthook`.
    """
    if arguments.exc_value is None or write_problem(arguments.exc_value) is None:
        threading.__excepthook__(arguments)


def _silence_stderr() -> None:
    """Send standard error to /dev/null: output of libraries at exit would hide the reason."""
    with contextlib.suppress(OSError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 2)
        os.close(devnull)
