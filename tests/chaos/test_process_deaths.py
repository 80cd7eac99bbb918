"""What is left when processes of a run are killed: nothing, and a documented exit code."""

import json
import signal
from pathlib import Path

import psutil
import pytest

from megatron_rl.contracts.exit_codes import ExitCode
from support.jobs import command_line, family, start_job, survivors, wait_for_step

pytestmark = [pytest.mark.chaos, pytest.mark.engine, pytest.mark.timeout(420)]


def named(processes: list[psutil.Process], part: str) -> list[psutil.Process]:
    return [p for p in processes if part in command_line(p)]


@pytest.mark.distributed
def test_nothing_outlives_killed_trainers(tmp_path: Path) -> None:
    job = start_job(tmp_path, "train.total_steps=500", ranks=2)
    wait_for_step(tmp_path / "job", 1, job)
    processes = family(job)
    trainers = [p for p in named(processes, "launch/train_rl.py") if "supervise" not in command_line(p)]
    others = [p for p in processes if p not in trainers]
    assert len(trainers) == 3  # torchrun and two ranks
    assert named(others, "sglang") and named(others, "megatron_rl.rollouts")
    for process in trainers:
        process.send_signal(signal.SIGKILL)
    assert survivors(others, 15) == []
    job.communicate()


def test_an_engine_that_dies_ends_the_run_with_its_log(tmp_path: Path) -> None:
    job = start_job(tmp_path, "train.total_steps=500")
    wait_for_step(tmp_path / "job", 1, job)
    processes = family(job)
    for process in named(processes, "sglang::scheduler"):
        process.send_signal(signal.SIGKILL)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == ExitCode.ENGINE_FAILED, output[-3000:]
    assert "last lines of its log" in output
    assert survivors(processes, 15) == []


def test_a_terminated_run_takes_everything_with_it(tmp_path: Path) -> None:
    job = start_job(tmp_path, "train.total_steps=500")
    wait_for_step(tmp_path / "job", 1, job)
    processes = family(job)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == ExitCode.TERMINATED, output[-3000:]
    assert json.loads((tmp_path / "job/exit.json").read_text())["code"] == ExitCode.TERMINATED
    assert survivors(processes, 15) == []


@pytest.mark.distributed
def test_terminating_two_ranks_in_the_middle_of_a_step_does_not_hang(tmp_path: Path) -> None:
    job = start_job(tmp_path, "train.total_steps=500", "parallel=ep2", ranks=2)
    wait_for_step(tmp_path / "job", 2, job)
    processes = family(job)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode != 0
    assert json.loads((tmp_path / "job/exit.json").read_text())["code"] == ExitCode.TERMINATED
    assert survivors(processes, 15) == []
