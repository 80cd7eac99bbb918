"""Trains runs one after another, or several at a time, and ends them with this process."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from launch.comparison.variants import Run, has_diverged, is_complete
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.records.exit_record import read_exit_record

_LOOK_SECONDS = 0.5
_CLOSING_SECONDS = 60.0  # twice what torchrun gives its ranks

Place = tuple[
    str, ...
]  # overrides that lead a run to an engine of its own; none: the run starts one


@dataclass(frozen=True, eq=False)
class _Job:
    run: Run
    place: Place
    process: subprocess.Popen[bytes]


def train_all(
    runs: Sequence[Run],
    script: Path,
    places: Sequence[Place],
    ranks: int,
    finished: Callable[[Run], None],
) -> int:
    """Train each run to its end, in place of what did not complete, as many at a time as there are
    places.

    With several places a run's output goes to ROOT/logs/NAME.log. After one that fails no other is
    started, and those under way go on to their end. Returns the exit code of the first that failed,
    or 0.
    """
    waiting, free, jobs, code = deque(runs), deque(places), list[_Job](), 0
    with ended_by_sigterm(), _ending_with_us(jobs):
        while jobs or (waiting and not code):
            while waiting and free and not code:
                jobs.append(
                    _start(waiting.popleft(), free.popleft(), script, ranks, apart=len(places) > 1)
                )
            job = _first_to_end(jobs)
            jobs.remove(job)
            free.append(job.place)
            if failed := _exit_code(job):
                code = code or failed
            else:
                finished(job.run)
    return code


def _start(run: Run, place: Place, script: Path, ranks: int, *, apart: bool) -> _Job:
    launcher = (
        []
        if ranks == 1
        else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    )
    command = [sys.executable, *launcher, str(script), *run.overrides, *place]
    if not apart:
        print(shlex.join(command), flush=True)
        return _Job(run, place, subprocess.Popen(command))
    logs = run.directory.parent / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    print(f"{run.directory.name}: started; its output is in {_log_of(run)}", flush=True)
    with _log_of(run).open("wb") as log:
        log.write(f"{shlex.join(command)}\n".encode())
        log.flush()
        return _Job(run, place, subprocess.Popen(command, stdout=log, stderr=log))


def _log_of(run: Run) -> Path:
    return run.directory.parent / "logs" / f"{run.directory.name}.log"


def _first_to_end(jobs: Sequence[_Job]) -> _Job:
    while True:
        for job in jobs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(_LOOK_SECONDS / len(jobs))
                return job


def _exit_code(job: _Job) -> int:
    """0 for a complete run, and for a trial that diverged; otherwise why it failed is told."""
    returned, run = job.process.returncode, job.run
    if (returned == 0 or has_diverged(run)) and is_complete(run):
        print(
            f"{run.directory.name}: {'diverged' if has_diverged(run) else 'complete'}", flush=True
        )
        return ExitCode.OK
    ended = read_exit_record(run.directory)
    signalled = 128 - returned if returned < 0 else returned
    code, reason = (
        (ended.code, ended.reason) if ended is not None else (signalled, "it left no exit.json")
    )
    where = f"; its output is in {_log_of(run)}" if _log_of(run).exists() else ""
    print(f"\n{run.directory.name} failed (exit code {code}): {reason}{where}", file=sys.stderr)
    print("The same command goes on here", file=sys.stderr)
    return code or 1


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM leaves the block by `SystemExit`, so that whatever it opened is closed."""

    def terminated(number: int, frame: object) -> NoReturn:
        raise SystemExit(ExitCode.TERMINATED)

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _ending_with_us(jobs: Sequence[_Job]) -> Iterator[None]:
    """However the block is left, the processes have ended.

    Ctrl-C reaches them without us, SIGTERM does not.
    """
    try:
        yield
    except KeyboardInterrupt:
        for job in jobs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(_CLOSING_SECONDS)
        raise
    finally:
        left = [job.process for job in jobs if job.process.poll() is None]
        for process in left:
            process.terminate()
        for process in left:
            process.wait()
