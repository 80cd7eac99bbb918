"""Injection of one fault into a run with two ranks."""

import contextlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.jobs import (
    command_line,
    process_tree,
    processes_named,
    start_job,
    survivors,
    wait_for_step,
)

# Less than parallel.timeout_s, after which ranks end by themselves
MAX_SECONDS = 60.0
_SHARED_MEMORY = Path("/dev/shm")
# Log lines of torchrun, which it may print before the run's lines
_TORCHRUN_LINE = re.compile(r"^\[?[WEI]\d{4} |^=+$|^\s*$")


@dataclass
class Scene:
    """A run that a fault strikes.

    directory: its run.root. job: its launcher.
    """

    directory: Path
    job: subprocess.Popen[str]
    processes: list[psutil.Process] = field(default_factory=list)
    shared_memory: set[Path] = field(default_factory=set)

    def find(self, part: str) -> list[psutil.Process]:
        """Processes of the run with `part` in their command line, without supervisors."""
        supervisors = processes_named(self.processes, "sglang_bridge.server.supervise")
        return [p for p in processes_named(self.processes, part) if p not in supervisors]

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank."""
        ranks = self.find("launch/train_rl.py")
        return next(p for p in ranks if p.environ().get("RANK") == str(number))


Prepare = Callable[[Path, contextlib.ExitStack], list[str]]


def prepare_nothing(directory: Path, stack: contextlib.ExitStack) -> list[str]:
    """Add no overrides."""
    return []


@dataclass(frozen=True)
class Fault:
    """A fault of a run with two ranks.

    first_line: pattern of the first line of standard error.
    code: code in exit.json. None if the run cannot leave one.
    strike: injects the fault after the first step. None for a fault from the start.
    prepare: prepares run.root and returns overrides.
    recovers: True if the fault strikes while the engine starts, and the run completes.
    """

    name: str
    first_line: str
    code: int | None
    strike: Callable[[Scene], None] | None = None
    prepare: Prepare = prepare_nothing
    recovers: bool = False
    steps: int = 500


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    seconds: from the fault to the end of the launcher and of all ranks.
    code: code in exit.json.
    launcher: exit code of the launcher.
    root_cause: exit code that torchrun names as the root cause.
    survivors: processes that outlive the run.
    shared_memory: files in /dev/shm that outlive the run.
    """

    seconds: float
    code: int | None
    launcher: int
    root_cause: int | None
    first_line: str
    errors: str
    survivors: list[str]
    shared_memory: list[str]


def inject(fault: Fault, directory: Path) -> Outcome:
    """Start a run with two ranks, inject the fault after its first step, and wait for the end."""
    directory.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        root = directory / "runs"
        root.mkdir()
        overrides = fault.prepare(root, stack)
        error_file = directory / "errors.txt"
        overrides = [f"train.total_steps={fault.steps}", "parallel=ep2", *overrides]
        scene = Scene(root, start_job(root, *overrides, ranks=2, errors=error_file))
        start = _strike(fault, scene)
        processes = _watch_to_the_end(scene)
        ranks = [process for process in processes if process.pid != scene.job.pid]
        survivors([p for p in ranks if "supervise" not in command_line(p)], MAX_SECONDS)
        seconds = time.monotonic() - start
        scene.job.communicate()
        names = survivors(processes, 5.0)
        _kill(processes)
        errors = error_file.read_text()
        return Outcome(
            seconds=seconds,
            code=_exit_code(root / "job" / "exit.json"),
            launcher=scene.job.returncode,
            root_cause=_root_cause(errors),
            first_line=_first_line(errors),
            errors=errors,
            survivors=names,
            shared_memory=sorted(path.name for path in scene.shared_memory if path.exists()),
        )


def _strike(fault: Fault, scene: Scene) -> float:
    """Inject the fault and return the time at which it struck."""
    if fault.strike is None:
        return time.monotonic()
    if not fault.recovers:
        wait_for_step(scene.directory / "job", 1, scene.job)
    scene.processes = process_tree(scene.job)
    scene.shared_memory = mapped_files(scene.processes)
    start = time.monotonic()
    fault.strike(scene)
    return start


def _watch_to_the_end(scene: Scene) -> list[psutil.Process]:
    """Wait for the launcher. Returns every process of the run, also those that started late.

    The files that they map in /dev/shm are added to the scene.
    """
    processes = {process.pid: process for process in scene.processes}
    while scene.job.poll() is None:
        with contextlib.suppress(psutil.Error):
            processes |= {process.pid: process for process in process_tree(scene.job)}
        scene.shared_memory |= mapped_files(processes.values())
        time.sleep(0.1)
    return list(processes.values())


def mapped_files(processes: Iterable[psutil.Process]) -> set[Path]:
    """Files in /dev/shm that processes have mapped."""
    files = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                if f" {_SHARED_MEMORY}/" in line and not line.endswith("(deleted)"):
                    files.add(_SHARED_MEMORY / line.rpartition(f"{_SHARED_MEMORY}/")[2])
    return files


def _exit_code(file: Path) -> int | None:
    return int(json.loads(file.read_text())["code"]) if file.exists() else None


def _root_cause(errors: str) -> int | None:
    """Return the exit code in torchrun's last line, negative for a signal; None without it."""
    match = re.search(r"^torchrun: .* with (?:exit code (\d+)|signal (\w+))$", errors, re.MULTILINE)
    if match is None:
        return None
    code, name = match.groups()
    return -signal.Signals[name] if name else int(code)


def _first_line(errors: str) -> str:
    lines = [line for line in errors.splitlines() if not _TORCHRUN_LINE.match(line)]
    return lines[0] if lines else ""


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
