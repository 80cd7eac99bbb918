"""Real runs of the main job, as a user starts them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["data.num_eval=16", "logger=quiet", "run.save_weights=false"]


def start_job(
    run_root: Path,
    *overrides: str,
    ranks: int = 1,
    errors: Path | None = None,
    python: tuple[str, ...] = (),
    experiment: str = "smoke",
) -> subprocess.Popen[str]:
    """Start an experiment: plain python for one rank, torchrun for more. Its run is `run_root/job`.

    errors: a file for standard error, which otherwise comes with the output. python: a command that
    runs the launcher.
    """
    launcher = (
        []
        if ranks == 1
        else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    )
    command = [
        *python,
        sys.executable,
        *launcher,
        str(ROOT / "launch/train_rl.py"),
        f"experiment={experiment}",
        *QUICK,
    ]
    command += [f"run.root={run_root}", "run.name=job", *overrides]
    stderr = errors.open("w") if errors is not None else None
    job = subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=stderr if stderr is not None else subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    if stderr is not None:
        stderr.close()
    return job


def wait_for_step(
    run: Path, step: int, job: subprocess.Popen[str], deadline_seconds: float = 240
) -> None:
    """Wait until metrics.jsonl holds `step`."""
    deadline = time.monotonic() + deadline_seconds
    while time.monotonic() < deadline:
        file = run / "metrics.jsonl"
        if file.exists() and any(
            json.loads(line)["step"] >= step for line in file.read_text().splitlines()
        ):
            return
        assert job.poll() is None, (
            f"the job ended with {job.returncode}:\n{job.communicate()[0][-4000:]}"
        )
        time.sleep(0.2)
    raise AssertionError(f"step {step} was not reached in {deadline_seconds} s")


def family(job: subprocess.Popen[str]) -> list[psutil.Process]:
    """The job's process and all its descendants."""
    parent = psutil.Process(job.pid)
    return [parent, *parent.children(recursive=True)]


def kill(job: subprocess.Popen[str], known: list[psutil.Process]) -> None:
    """All processes at once, as a node that loses its power: those that are `known` stand still
    while it looks.
    """
    for process in reversed(known):  # the ranks before their launcher
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    processes = family(job)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    job.communicate(timeout=60)
    assert survivors(processes, 10) == []


def named(processes: list[psutil.Process], part: str) -> list[psutil.Process]:
    """Those with `part` in their command line."""
    return [p for p in processes if part in command_line(p)]


def survivors(processes: list[psutil.Process], seconds: float) -> list[str]:
    """What is still alive after waiting up to `seconds`; zombies count as dead."""
    deadline = time.monotonic() + seconds
    while True:
        alive = [p for p in processes if lives(p)]
        if not alive or time.monotonic() > deadline:
            return [f"{p.pid} {command_line(p)[:120]}" for p in alive]
        time.sleep(0.2)


def lives(process: psutil.Process) -> bool:
    """Whether it runs or could; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def command_line(process: psutil.Process) -> str:
    """Empty for a process that has ended, zombies included."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
