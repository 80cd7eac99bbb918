"""Real runs of the main job, started as a user starts them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

import psutil

ROOT = Path(__file__).resolve().parents[2]
# Overrides that make a run short
SHORT_RUN = ["data.num_eval=16", "logger=quiet", "run.save_weights=false"]


def start_job(
    run_root: Path,
    *overrides: str,
    ranks: int = 1,
    restarts: int = 0,
    errors: Path | None = None,
    python: tuple[str, ...] = (),
    experiment: str = "smoke",
    script: str = "launch/train_rl.py",
) -> subprocess.Popen[str]:
    """Start an experiment, whose run is `run_root/job`. More than one rank starts with torchrun.

    restarts: how often torchrun may start the ranks again.
    errors: file for standard error, which otherwise comes with the output.
    python: command that runs Python. script: what it runs, from the root of the repository.
    """
    launcher = []
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        launcher.append(f"--max-restarts={restarts}")
    settings = [f"experiment={experiment}", *SHORT_RUN, f"run.root={run_root}", "run.name=job"]
    command = [*python, sys.executable, *launcher, str(ROOT / script), *settings, *overrides]
    with contextlib.ExitStack() as stack:
        stderr: int | TextIO = subprocess.STDOUT
        if errors is not None:
            stderr = stack.enter_context(errors.open("w"))
        return subprocess.Popen(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )


def wait_for_step(
    run: Path, step: int, job: subprocess.Popen[str], deadline_seconds: float = 240
) -> None:
    """Wait until metrics.jsonl holds `step`."""
    deadline = time.monotonic() + deadline_seconds
    while time.monotonic() < deadline:
        if last_step(run / "metrics.jsonl") >= step:
            return
        assert job.poll() is None, (
            f"the job ended with {job.returncode}:\n{job.communicate()[0][-4000:]}"
        )
        time.sleep(0.2)
    raise AssertionError(f"step {step} was not reached in {deadline_seconds} s")


def last_step(metrics: Path) -> int:
    """The largest step of metrics.jsonl, or -1."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=-1)


def process_tree(job: subprocess.Popen[str]) -> list[psutil.Process]:
    """The process of the job and all its descendants."""
    parent = psutil.Process(job.pid)
    return [parent, *parent.children(recursive=True)]


def kill(job: subprocess.Popen[str], processes: list[psutil.Process]) -> None:
    """Kill all processes at once, as a power failure of the node does.

    processes: processes to suspend first, so that the run starts no others meanwhile.
    """
    for process in reversed(processes):  # the ranks before their launcher
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    tree = process_tree(job)
    for process in tree:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    job.communicate(timeout=60)
    assert survivors(tree, 10) == []


def processes_named(processes: list[psutil.Process], part: str) -> list[psutil.Process]:
    """The processes with `part` in their command line."""
    return [process for process in processes if part in command_line(process)]


def survivors(processes: list[psutil.Process], seconds: float) -> list[str]:
    """The processes that are alive after waiting up to `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        alive = [process for process in processes if is_alive(process)]
        if not alive or time.monotonic() > deadline:
            return [f"{process.pid} {command_line(process)[:120]}" for process in alive]
        time.sleep(0.2)


def is_alive(process: psutil.Process) -> bool:
    """True for a process that has not ended. A zombie has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def command_line(process: psutil.Process) -> str:
    """The command line of a process, or an empty string for one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
