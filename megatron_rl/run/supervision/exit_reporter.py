"""Reports the cause of a run's end exactly once.

It goes to standard error for people, to exit.json for scripts and to torchrun's error file.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.records.exit_record import read_exit_record, write_exit_record
from megatron_rl.run.supervision.local_ranks import LocalRanks

_PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.05
_MAX_LOG_LINES = 10  # on standard error; exit.json has more
SIGNALS = {
    signal.SIGHUP: ExitCode.HUNG_UP,
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.TERMINATED,
}


class ExitReporter:
    """Reports why this rank ended.

    A rank that failed only because another one did stays silent. Of `report_success`,
    `report_cause`, `report_consequence` and `report_signal`, the first call decides. Any thread may
    call them.

    is_resumable: the run resumes when its command is run again, so that a SIGTERM ends it with the
    code for that. patience_seconds: the time that a rank waits for the report of another one.
    directory: the run directory, None until there is one. exit_code: the code that this process
    will end with, None while it runs. has_reported: True once this rank has reported the cause.
    """

    def __init__(
        self,
        ranks: LocalRanks,
        *,
        is_resumable: bool = False,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        self._ranks = ranks
        self._is_resumable = is_resumable
        self._patience = patience_seconds
        self._lock = threading.Lock()
        self.directory: Path | None = None
        self.exit_code: int | None = None
        self.has_reported = False

    def report_success(self) -> None:
        """The run is complete. Rank 0 writes exit.json."""
        with self._lock:
            if self.exit_code is None:
                self.exit_code = ExitCode.OK
                if self._ranks.rank == 0:
                    self._record(ExitCode.OK, "the run is complete")

    def report_cause(self, code: int, reason: str, trace: str = "", log_tail: str = "") -> None:
        """This rank knows why the run ends.

        trace: a traceback to print before the reason. log_tail: the last lines of the log of the
        process that failed.
        """
        # Without a directory, a rank cannot see whether another one has reported
        may_be_first = self.directory is not None or self._ranks.rank == 0
        self._decide(lambda: self._report(code, reason, trace, log_tail, wait=not may_be_first))

    def report_consequence(self, code: int, reason: str) -> None:
        """This rank failed, perhaps only because another rank ended.

        The report of another rank takes precedence, then the silent death of another rank, then
        this reason.
        """
        self._decide(lambda: self._explain(code, reason))

    def report_signal(self, number: int) -> None:
        """A signal arrived, from a user, or from torchrun because a rank of this node ended."""
        self._decide(lambda: self._explain_signal(signal.Signals(number)))

    def _decide(self, decision: Callable[[], int]) -> None:
        with self._lock:
            if self.exit_code is None:
                self.exit_code = decision()

    def _explain(self, code: int, reason: str) -> int:
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline:
            if self._is_reported():
                return ExitCode.PEER_FAILED
            dead_ranks = self._ranks.dead_ranks()
            if dead_ranks and self._ranks.is_lowest_living():
                return self._report(ExitCode.PEER_FAILED, _silent_death(dead_ranks))
            time.sleep(_POLL_SECONDS)
        # The lowest rank reports first, unless it hangs
        return self._report(code, reason, wait=not self._ranks.is_lowest_living())

    def _explain_signal(self, number: signal.Signals) -> int:
        code = SIGNALS[number]
        # A dying torchrun sends signals before its own death can be seen
        time.sleep(_POLL_SECONDS)
        if self._ranks.is_orphaned:
            return self._explain_orphan(code)
        if self._ranks.dead_ranks() or self._is_reported():
            return self._explain(ExitCode.PEER_FAILED, "another rank ended")
        if self._ranks.rank != 0:
            # Rank 0 received the signal too, and knows as much as this rank
            self._wait_for_report()
        reason = f"the run was stopped ({number.name})"
        if self._is_resumable and number == signal.SIGTERM:
            code = ExitCode.REQUEUE
            reason += ". Start it again with run.resume=auto"
        return self._report(code, reason)

    def _explain_orphan(self, code: int) -> int:
        """Torchrun is gone: the first rank of the node reports that."""
        if self._ranks.local_rank != 0:
            self._wait_for_report()
            return code
        agent = self._ranks.agent
        return self._report(
            code, f"torchrun (process {agent}) was killed, and its ranks end with it"
        )

    def _report(
        self, code: int, reason: str, trace: str = "", log_tail: str = "", *, wait: bool = False
    ) -> int:
        """Report unless another rank has. Returns `code`, or PEER_FAILED when another rank has.

        wait: give other ranks time to report first.
        """
        if wait:
            self._wait_for_report()
        if self._is_reported() or not self._record(code, reason, log_tail):
            is_signal = code in (*SIGNALS.values(), ExitCode.REQUEUE)
            return code if is_signal else ExitCode.PEER_FAILED
        if code in set(ExitCode):
            meaning = ExitCode(code).name.lower()
        else:
            meaning = "unexpected error: please report it"
        with contextlib.suppress(OSError, ValueError):
            lines = [f"  {line}" for line in log_tail.splitlines()[-_MAX_LOG_LINES:]]
            lines += trace.splitlines()
            blank = [""] if lines else []
            lines = ["", *lines, *blank, reason, f"(exit code {code}: {meaning})"]
            print("\n".join(lines), file=sys.stderr, flush=True)
        self.has_reported = True
        self._write_error_file(reason)
        return code

    def _is_reported(self) -> bool:
        """True once any rank has reported."""
        if self.directory is not None and read_exit_record(self.directory) is not None:
            return True
        return self._ranks.has_report()

    def _wait_for_report(self) -> None:
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline and not self._is_reported():
            time.sleep(_POLL_SECONDS)

    def _record(self, code: int, reason: str, log_tail: str = "") -> bool:
        """Write exit.json. Returns False when another rank has written it.

        Errors of the disk are ignored: they must not silence the report.
        """
        if self.directory is None:
            return True
        try:
            return write_exit_record(self.directory, code, reason, log_tail)
        except OSError:
            return True

    def _write_error_file(self, reason: str) -> None:
        """Write torchrun's error file.

        Torchrun names the rank with the earliest error file as the root cause and quotes it.
        """
        if self._ranks.error_file is None:
            return
        first_line = reason.partition("\n")[0]
        timestamp = str(int(time.time()))
        error = {
            "message": first_line,
            "extraInfo": {"py_callstack": first_line, "timestamp": timestamp},
        }
        with contextlib.suppress(OSError):
            self._ranks.error_file.write_text(json.dumps({"message": error}))


def _silent_death(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks))
    return (
        f"rank {names} of the training ended without a report: it was killed from outside "
        "(SIGKILL), killed by the kernel because memory ran out (see dmesg), or it crashed in "
        "native code"
    )
