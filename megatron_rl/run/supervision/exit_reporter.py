"""Why a run ended, said once: to people on standard error, to scripts in exit.json, to torchrun in
its error file.
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
SIGNALS = {
    signal.SIGHUP: ExitCode.HUNG_UP,
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.TERMINATED,
}


class ExitReporter:
    """One rank's part in that: it speaks when it knows the cause, and is quiet about what follows
    from another's end.

    directory: of the run, once there is one. code: what this process ends with, None while it goes
    on. spoke: whether this rank said it. The first of `cause`, `consequence`, `told_to_stop` and
    `complete` decides; any thread may call.
    """

    def __init__(
        self, siblings: LocalRanks, *, patience_seconds: float = _PATIENCE_SECONDS
    ) -> None:
        self._siblings = siblings
        self._patience = patience_seconds
        self._lock = threading.Lock()
        self.directory: Path | None = None
        self.code: int | None = None
        self.spoke = False

    def complete(self) -> None:
        """Nothing went wrong. Rank 0 leaves it in exit.json."""
        with self._lock:
            if self.code is None:
                self.code = ExitCode.OK
                if self._siblings.rank == 0:
                    self._record(ExitCode.OK, "the run is complete")

    def cause(self, code: int, reason: str, trace: str = "") -> None:
        """This rank knows why the run ends."""
        known = (
            self.directory is not None or self._siblings.rank == 0
        )  # others cannot tell whether they are the first
        self._decide(lambda: self._say(code, reason, trace, first=known))

    def consequence(self, code: int, reason: str) -> None:
        """Trouble that another rank's end may explain: its words go first, then its death without
        any.
        """
        self._decide(lambda: self._explain(code, reason))

    def told_to_stop(self, number: int) -> None:
        """A signal came: from a user, or from torchrun because a rank of this node ended."""
        self._decide(lambda: self._explain_signal(signal.Signals(number)))

    def _decide(self, decision: Callable[[], int]) -> None:
        with self._lock:
            if self.code is None:
                self.code = decision()

    def _explain(self, code: int, reason: str) -> int:
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline:
            if self._heard():
                return ExitCode.PEER_FAILED
            if (dead := self._siblings.dead()) and self._siblings.leads():
                return self._say(ExitCode.PEER_FAILED, _death_of(dead))
            time.sleep(_POLL_SECONDS)
        return self._say(code, reason) if self._siblings.leads() else ExitCode.PEER_FAILED

    def _explain_signal(self, number: signal.Signals) -> int:
        code = SIGNALS[number]
        time.sleep(_POLL_SECONDS)  # a dying torchrun signals before it is seen to be dead
        if self._siblings.orphaned:
            said = (
                f"torchrun (process {self._siblings.agent}) was killed, and its ranks end with it"
            )
            return (
                self._say(code, said)
                if self._siblings.local_rank == 0
                else self._wait_for_words(code)
            )
        if self._siblings.dead() or self._heard():
            return self._explain(ExitCode.PEER_FAILED, "another rank ended")
        if self._siblings.rank != 0:  # told as well, and knows no more than rank 0
            self._wait_for_words(code)
        return self._say(code, f"the run was told to stop ({number.name})")

    def _say(self, code: int, reason: str, trace: str = "", *, first: bool = True) -> int:
        """Returns `code`, or PEER_FAILED where another rank was first.

        first False: let others speak for a while.
        """
        if not first:
            self._wait_for_words(code)
        if self._heard() or not self._record(code, reason):
            return code if code in SIGNALS.values() else ExitCode.PEER_FAILED
        name = (
            ExitCode(code).name.lower()
            if code in set(ExitCode)
            else "nobody foresaw this: please report it"
        )
        with contextlib.suppress(OSError, ValueError):
            print(f"\n{reason}\n(exit code {code}: {name})\n{trace}", file=sys.stderr, flush=True)
        self.spoke = True
        self._tell_torchrun(reason)
        return code

    def _heard(self) -> bool:
        recorded = read_exit_record(self.directory) if self.directory is not None else None
        return recorded is not None or self._siblings.has_spoken()

    def _wait_for_words(self, code: int) -> int:
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline and not self._heard():
            time.sleep(_POLL_SECONDS)
        return code

    def _record(self, code: int, reason: str) -> bool:
        """False where another rank's words are there already.

        A disk that takes nothing silences nobody.
        """
        if self.directory is None:
            return True
        try:
            return write_exit_record(self.directory, code, reason)
        except OSError:
            return True

    def _tell_torchrun(self, reason: str) -> None:
        """Its summary names the rank with the earliest words as the root cause, and quotes them."""
        if self._siblings.error_file is not None:
            line = reason.partition("\n")[0]
            words = {
                "message": line,
                "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))},
            }
            with contextlib.suppress(OSError):
                self._siblings.error_file.write_text(json.dumps({"message": words}))


def _death_of(ranks: list[int]) -> str:
    who = "rank " + ", ".join(map(str, ranks))
    return (
        f"{who} of the training ended without a word: killed from outside (SIGKILL), by the kernel for want of memory "
        "(see dmesg), or by a crash in native code"
    )
