"""Follows a run from outside: its output, its steps and its processes, with the time of each."""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.lab.faults.injection import Scene
from tests.support.jobs import command_line, last_step, process_tree, start_job

# Files in run.root, see pausable_run.py
HOLD = "hold"
HELD = "held"
_POLL_SECONDS = 0.2
_END_SECONDS = 20.0
_SERVER = "sglang.launch_server"
_SUPERVISOR = "sglang_bridge.server.supervise"


class RunFollower:
    """A run that is being watched. Its directory is `root/job`.

    step_times: when the record of each step appeared. server_births: when each server's process
    began, by process id. All times are on the monotonic clock.
    """

    def __init__(
        self, root: Path, settings: Sequence[str], *, ranks: int, script: str = "launch/train_rl.py"
    ) -> None:
        self.root = root
        self.run = root / "job"
        self.job: subprocess.Popen[str] = start_job(root, *settings, ranks=ranks, script=script)
        self.step_times: dict[int, float] = {}
        self.server_births: dict[int, float] = {}
        self.processes: dict[int, psutil.Process] = {}
        self._lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        """Everything that the run has printed."""
        return "".join(line for _, line in list(self._lines))

    @property
    def step(self) -> int:
        """The last step that has a record, or -1."""
        return max(self.step_times, default=-1)

    def step_begun_since(self, moment: float) -> float | None:
        """Return when a step got its record that had begun since a time.

        The first record since then may be of a step whose rollouts were sampled before.
        """
        later_times = sorted(time for time in self.step_times.values() if time >= moment)
        return later_times[1] if len(later_times) > 1 else None

    def find(self, pattern: str, since: float) -> tuple[float, str] | None:
        """Return the first line with a pattern that was printed since a time, and its time."""
        for moment, line in list(self._lines):
            if moment >= since and re.search(pattern, line):
                return moment, line.strip()
        return None

    def wait_for_line(self, pattern: str, since: float, deadline_seconds: float) -> float:
        """Watch until such a line was printed, and return its time. Raises AssertionError."""
        deadline = time.monotonic() + deadline_seconds
        while (hit := self.find(pattern, since)) is None:
            assert time.monotonic() < deadline, f"no {pattern!r}:\n{self.output[-6000:]}"
            is_running = self.watch()
            assert is_running or self.find(pattern, since), (
                f"the run ended without {pattern!r}:\n{self.output[-6000:]}"
            )
        return hit[0]

    def watch(self) -> bool:
        """Look once, and wait a moment. Returns False after the end of the run."""
        is_running = self.job.poll() is None
        step = last_step(self.run / "metrics.jsonl")
        now = time.monotonic()
        for new_step in range(self.step + 1, step + 1):
            self.step_times[new_step] = now
        if is_running:
            self._find_processes()
            time.sleep(_POLL_SECONDS)
        return is_running

    def wait_for_step(self, step: int, deadline_seconds: float) -> None:
        """Watch until a step has its record. Raises AssertionError if the run ends before."""
        deadline = time.monotonic() + deadline_seconds
        while self.step < step:
            assert self.watch() or self.step >= step, f"the run ended:\n{self.output[-4000:]}"
            assert time.monotonic() < deadline, f"step {step} did not come:\n{self.output[-4000:]}"

    def wait(self, deadline_seconds: float) -> int | None:
        """Watch until the run ends, and return its launcher's code; None if it was killed."""
        deadline = time.monotonic() + deadline_seconds
        while self.watch():
            if time.monotonic() > deadline:
                self.kill()
                return None
        self._reader.join(_END_SECONDS)
        return self.job.returncode

    def scene(self) -> Scene:
        """The processes of the run at this moment."""
        return Scene(self.root, self.job, process_tree(self.job))

    def kill(self) -> None:
        """Kill the run and all its processes."""
        self._find_processes()
        for process in [*self.processes.values(), psutil.Process(self.job.pid)]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.job.wait()

    def _find_processes(self) -> None:
        with contextlib.suppress(psutil.Error):
            for process in process_tree(self.job):
                if process.pid not in self.processes:
                    self.processes[process.pid] = process
                self._note_server(process)

    def _note_server(self, process: psutil.Process) -> None:
        """A process becomes a server only some time after its birth."""
        if process.pid in self.server_births:
            return
        words = command_line(process)
        if _SERVER in words and _SUPERVISOR not in words:
            with contextlib.suppress(psutil.Error):
                age = time.time() - process.create_time()
                self.server_births[process.pid] = time.monotonic() - age

    def _read(self) -> None:
        assert self.job.stdout is not None
        for line in self.job.stdout:
            self._lines.append((time.monotonic(), line))
