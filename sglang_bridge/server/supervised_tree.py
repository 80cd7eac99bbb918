"""The process tree of one helper, which can be ended and started again."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from sglang_bridge.server.process_table import kill, process_tree, wait_for_end
from sglang_bridge.server.shared_memory import mapped_shared_memory, remove_shared_memory

_KILL_SECONDS = 10.0  # from SIGKILL to the end, unless the kernel blocks the process


class SupervisedTree:
    """A supervisor and everything below it: one start of a helper after the other.

    One thread starts and ends the helper. Any thread may `close` it. From then on nothing is
    started, and what runs is ended.

    Invariant: nothing that was started is left after `close` has returned
    (tests/sglang_bridge/server/test_supervised_tree.py::test_a_close_wins_over_starts).
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        # Noted while the helper is healthy: they are unknown once the supervisor is dead
        self._members: list[psutil.Process] = []
        self._shared_memory: set[Path] = set()
        self._scratch: Path | None = None

    def start(
        self,
        start_supervisor: Callable[[], subprocess.Popen[bytes]],
        *,
        scratch: Path | None = None,
    ) -> bool:
        """Start the helper, whose earlier tree has ended. Returns False after `close` began.

        scratch: a directory of the helper, which `end` removes.
        """
        with self._lock:
            if not self._is_closed:
                self._scratch = scratch
                self._process = start_supervisor()
        return not self._is_closed

    @property
    def pid(self) -> int:
        """The process id of the supervisor. Raises `RuntimeError` before the first start."""
        if self._process is None:
            raise RuntimeError("the helper was never started")
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code of the supervisor, None while it runs or before the first start."""
        return None if self._process is None else self._process.poll()

    def note_members(self) -> None:
        """Remember the processes and their shared memory, so that `end` finds all of them."""
        self._members = process_tree(self.pid)
        self._shared_memory = mapped_shared_memory(member.pid for member in self._members)

    def request_end(self) -> None:
        """Ask the supervisor to end the tree, and do not wait.

        Without a supervisor, the processes that it has left are killed. Processes that were stopped
        (SIGSTOP) are continued, so that they end in an orderly way.
        """
        process = self._process
        if process is None or process.poll() is not None:
            kill(self._members)
            return
        process.terminate()
        for member in process_tree(process.pid):
            with contextlib.suppress(psutil.Error):
                member.resume()

    def end(self, timeout: float) -> None:
        """End the tree, and remove its shared memory and its directory.

        A process that does not end within `timeout` seconds is killed.
        """
        process = self._process
        if process is None:
            return
        members = list(self._members)
        if process.poll() is None:  # otherwise, its id may be another process's by now
            members += process_tree(process.pid)
        living_pids = [member.pid for member in members if member.is_running()]
        shared_memory = self._shared_memory | mapped_shared_memory(living_pids)
        self.request_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
        # The supervisor hangs, or was killed and has left its processes behind
        kill(members)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel blocks it
            process.wait(_KILL_SECONDS)
        wait_for_end(members, _KILL_SECONDS)
        remove_shared_memory(shared_memory)
        if self._scratch is not None:
            # A supervisor that was killed has not removed it
            shutil.rmtree(self._scratch, ignore_errors=True)
        self._members = []
        self._shared_memory = set()

    def close(self, timeout: float) -> None:
        """Let nothing be started again, and `end` what runs. You may call it again."""
        with self._lock:
            self._is_closed = True
        self.end(timeout)
