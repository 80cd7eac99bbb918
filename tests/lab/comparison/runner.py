"""Training of runs, one after another or several at a time."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.records.exit_record import read_exit_record
from tests.lab.comparison.variants import Run, is_complete

_POLL_SECONDS = 0.5
_SHUTDOWN_SECONDS = 60.0  # twice what torchrun gives its ranks

# Overrides that connect a run to a shared engine. Without any, the run starts an engine.
EngineOverrides = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Job:
    run: Run
    engine: EngineOverrides
    process: subprocess.Popen[bytes]


@dataclass
class _Queue:
    """Runs that wait for a free engine, and jobs that are running.

    code: exit code of the first run that failed, or 0.
    """

    runs: deque[Run]
    engines: deque[EngineOverrides]
    jobs: list[_Job] = field(default_factory=list)
    code: int = 0

    @property
    def can_start(self) -> bool:
        """True if a run may start: one waits, an engine is free, and no run has failed."""
        return bool(self.runs and self.engines) and not self.code


def train_all(
    runs: Sequence[Run],
    script: Path,
    engines: Sequence[EngineOverrides],
    ranks: int,
    on_complete: Callable[[Run], None],
) -> int:
    """Train each run to its end, one for each of the engines at a time.

    A run replaces what an incomplete run left. With several engines the output of a run goes to
    ROOT/logs/NAME.log. After a failure no run is started, and running ones continue to their end.
    Returns the exit code of the first run that failed, or 0.

    script: `launch/train_rl.py`.
    on_complete: called with each complete run.
    """
    queue = _Queue(deque(runs), deque(engines))
    with exit_on_sigterm(), _stop_at_exit(queue.jobs):
        while queue.jobs or (queue.runs and not queue.code):
            while queue.can_start:
                run = queue.runs.popleft()
                engine = queue.engines.popleft()
                queue.jobs.append(_start(run, engine, script, ranks, to_log=len(engines) > 1))
            job = _wait_for_one(queue.jobs)
            queue.jobs.remove(job)
            queue.engines.append(job.engine)
            code = _exit_code(job)
            if code:
                queue.code = queue.code or code
            else:
                on_complete(job.run)
    return queue.code


def _start(run: Run, engine: EngineOverrides, script: Path, ranks: int, *, to_log: bool) -> _Job:
    launcher = []
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *launcher, str(script), *run.overrides, *engine]
    if not to_log:
        print(shlex.join(command), flush=True)
        return _Job(run, engine, subprocess.Popen(command))
    file = _log_file(run)
    file.parent.mkdir(parents=True, exist_ok=True)
    print(f"{run.directory.name}: started; its output is in {file}", flush=True)
    with file.open("wb") as log:
        log.write(f"{shlex.join(command)}\n".encode())
        log.flush()
        return _Job(run, engine, subprocess.Popen(command, stdout=log, stderr=log))


def _log_file(run: Run) -> Path:
    return run.directory.parent / "logs" / f"{run.directory.name}.log"


def _wait_for_one(jobs: Sequence[_Job]) -> _Job:
    while True:
        for job in jobs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(_POLL_SECONDS / len(jobs))
                return job


def _exit_code(job: _Job) -> int:
    """Return 0 for a complete run. Report any other end."""
    run = job.run
    status = job.process.returncode
    if status == 0 and is_complete(run):
        print(f"{run.directory.name}: complete", flush=True)
        return ExitCode.OK
    record = read_exit_record(run.directory)
    if record is not None:
        code = record.code
        reason = record.reason
    else:
        code = 128 - status if status < 0 else status
        reason = "it left no exit.json"
    file = _log_file(run)
    location = f"; its output is in {file}" if file.exists() else ""
    print(f"\n{run.directory.name} failed (exit code {code}): {reason}{location}", file=sys.stderr)
    print("Run the same command again to continue", file=sys.stderr)
    return code or 1


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Leave the block with `SystemExit` at SIGTERM, so that everything opened in it is closed."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(ExitCode.TERMINATED)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def _stop_at_exit(jobs: Sequence[_Job]) -> Iterator[None]:
    """Stop all processes when the block ends in any way.

    Ctrl-C reaches the processes directly, SIGTERM does not.
    """
    try:
        yield
    except KeyboardInterrupt:
        for job in jobs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(_SHUTDOWN_SECONDS)
        raise
    finally:
        processes = [job.process for job in jobs if job.process.poll() is None]
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
