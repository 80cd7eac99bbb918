"""The cost of a step: wall time, and the processor time of all processes of a job."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import psutil

from megatron_rl.records.past_run import read_metrics
from tests.support.jobs import last_step, process_tree

_POLL_SECONDS = 0.1
_START_SECONDS = 900.0
_STEP_SECONDS = 900.0


@dataclass(frozen=True)
class StepCost:
    """The mean of some steps.

    wall, cpu: seconds. sampling: seconds in which training waits for rollouts. other_cores: the
    cores that processes of other programs used meanwhile.
    """

    wall: float
    cpu: float
    sampling: float
    other_cores: float


@dataclass(frozen=True)
class _Clocks:
    """The seconds of the clocks at a moment. job, machine: processor time."""

    wall: float
    job: float
    machine: float


@contextlib.contextmanager
def running_job(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[str]]:
    """Start a job whose output goes to a file. At the end of the block none of it is left."""
    with log.open("w") as output:
        job: subprocess.Popen[str] = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, text=True
        )
    try:
        yield job
    finally:
        if job.poll() is None:
            for process in reversed(process_tree(job)):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        job.wait()


def measure(
    job: subprocess.Popen[str], directory: Path, *, warm_up: int, steps: int, log: Path
) -> StepCost:
    """Return the mean cost of the steps after the first ones, while the job runs.

    directory: has the metrics.jsonl that the job writes. Raises `SystemExit` if the job ends too
    early.
    """
    _wait(job, directory, warm_up, _START_SECONDS, log)
    start = _read_clocks(job)
    last = warm_up + steps
    _wait(job, directory, last, _STEP_SECONDS * steps, log)
    end = _read_clocks(job)
    sampling = fmean(
        record["time/rollout"] or 0.0
        for record in read_metrics(directory)
        if warm_up < (record["step"] or 0) <= last
    )
    wall = end.wall - start.wall
    cpu = end.job - start.job
    others = max(0.0, end.machine - start.machine - cpu)
    return StepCost(wall / steps, cpu / steps, sampling, others / wall)


def _wait(
    job: subprocess.Popen[str], directory: Path, step: int, seconds: float, log: Path
) -> None:
    """Wait until a step has its record."""
    deadline = time.monotonic() + seconds
    while last_step(directory / "metrics.jsonl") < step:
        has_ended = job.poll() is not None
        if has_ended or time.monotonic() > deadline:
            reason = f"ended with {job.returncode}" if has_ended else f"took {seconds:.0f} s"
            raise SystemExit(f"step {step} did not come: the job {reason}. See {log}")
        time.sleep(_POLL_SECONDS)


def _read_clocks(job: subprocess.Popen[str]) -> _Clocks:
    seconds = 0.0
    for process in process_tree(job):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            # Processes that have ended count with their parents
            seconds += times.user + times.system + times.children_user + times.children_system
    machine = psutil.cpu_times()
    busy = sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice
    return _Clocks(time.monotonic(), seconds, busy)
