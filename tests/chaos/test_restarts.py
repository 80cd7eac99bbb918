"""torchrun and Slurm start a run again whose ranks or launcher were killed, and it ends exactly."""

import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from megatron_rl.records.exit_record import read_exit_record
from megatron_rl.records.past_run import read_metrics
from megatron_rl.records.starts import read_starts
from sglang_bridge.server.process_table import environment_variable
from tests.support.comparable import assert_same_weights, metrics_of
from tests.support.exactness import EXACT
from tests.support.jobs import ROOT, SHORT_RUN, command_line, last_step, start_job

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.engine,
    pytest.mark.distributed,
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
]
exact = pytest.mark.skipif(
    not EXACT, reason="MKL's sums depend on the batch on a processor without AVX-512"
)
STEPS = 6
DTYPES = ("float32", "bfloat16")
SETTINGS = (
    "parallel=ep2",
    f"train.total_steps={STEPS}",
    "run.checkpoint_every=1",
    "run.save_weights=true",
    "logger.progress=true",
)
RESUMED = (*SETTINGS, "run.resume=auto")
_STEP_SECONDS = 400.0


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give the directory of a run in which nothing is killed, for each type."""

    @functools.cache
    def run(dtype: str) -> Path:
        root = tmp_path_factory.mktemp(f"undisturbed-{dtype}")
        job = start_job(root, *SETTINGS, f"model.dtype={dtype}", ranks=2)
        output, _ = job.communicate(timeout=900)
        assert job.returncode == 0, output[-4000:]
        return root / "job"

    return run


def wait_for_recorded_step(run: Path, step: int, job: subprocess.Popen[str]) -> None:
    """Wait for a step. A start that resumes removes later steps from the records."""
    deadline = time.monotonic() + _STEP_SECONDS
    while last_step(run / "metrics.jsonl") < step:
        assert job.poll() is None, f"the job ended with {job.returncode}"
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.1)


def processes_below(job: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(job.pid).children(recursive=True)


def torchrun_of(job: subprocess.Popen[str]) -> psutil.Process:
    processes = [psutil.Process(job.pid), *processes_below(job)]
    return next(process for process in processes if "--nproc-per-node" in command_line(process))


def rank_process(job: subprocess.Popen[str], rank: int) -> psutil.Process:
    ranks = torchrun_of(job).children()
    return next(p for p in ranks if environment_variable(p.pid, "RANK") == str(rank))


def kill_at_once(processes: Sequence[psutil.Process]) -> None:
    for action in (psutil.Process.suspend, psutil.Process.kill):
        for process in reversed(processes):
            with contextlib.suppress(psutil.NoSuchProcess):
                action(process)


def assert_equal_to(run: Path, reference: Path) -> None:
    """Compare a run that was started again with one that was not."""
    assert [record["step"] for record in read_metrics(run)] == list(range(STEPS + 1))
    assert metrics_of(run) == metrics_of(reference)
    assert_same_weights(run, reference, STEPS)


def run_with_killed_ranks(root: Path, dtype: str) -> str:
    """Train to the end while rank 0 and later rank 1 are killed. Returns the output."""
    job = start_job(
        root,
        *RESUMED,
        f"model.dtype={dtype}",
        ranks=2,
        restarts=2,
        errors=root / "errors",
    )
    try:
        for rank, step in ((0, 2), (1, 4)):
            wait_for_recorded_step(root / "job", step, job)
            rank_process(job, rank).kill()
        output, _ = job.communicate(timeout=900)
    finally:
        if job.poll() is None:
            kill_at_once([psutil.Process(job.pid), *processes_below(job)])
    assert job.returncode == 0, output[-3000:] + (root / "errors").read_text()[-3000:]
    return output


@exact
@pytest.mark.parametrize("dtype", DTYPES)
def test_torchrun_restarts_ranks_that_are_killed_and_the_run_ends_exactly(
    tmp_path: Path, reference_of: Callable[[str], Path], dtype: str
) -> None:
    reference = reference_of(dtype)
    run = tmp_path / "job"
    output = run_with_killed_ranks(tmp_path, dtype)
    assert_equal_to(run, reference)
    *ends, last = [start.end for start in read_starts(run)]
    assert last is None
    for rank, end in enumerate(ends):
        assert end is not None and end.code == 7
        assert end.reason.startswith(f"rank {rank} of the training ended without a report")
    assert len(ends) == 2 and "effective training time" in output
    assert 0 < effective_time_of(run) < effective_time_of(reference) <= 1


def effective_time_of(run: Path) -> float:
    value = read_metrics(run)[-1]["run/effective_time"]
    assert value is not None
    return value


def test_torchrun_does_not_restart_a_run_that_was_asked_to_stop(tmp_path: Path) -> None:
    """Each restart ends with the reason and code of the first end, and trains nothing."""
    run = tmp_path / "job"
    job = start_job(tmp_path, *RESUMED, "train.total_steps=500", ranks=2, restarts=1)
    wait_for_recorded_step(run, 1, job)
    (run / "stop").touch()
    output, _ = job.communicate(timeout=300)
    record = read_exit_record(run)
    assert record is not None and record.code == 75
    assert job.returncode == 1
    assert "the run has ended already, and starts no more" in output
    assert len(read_starts(run)) == 1


def test_a_failure_at_one_step_ends_after_two_starts(tmp_path: Path) -> None:
    """No checkpoint comes between: the third start refuses, and so do all later ones."""
    run = tmp_path / "job"
    job = start_job(tmp_path, *RESUMED, "train.total_steps=500", ranks=2, restarts=4)
    for count in (1, 2):
        wait_until(lambda count=count: len(read_starts(run)) == count, job)  # type: ignore[misc]
        rank_process(job, 1).kill()
    output, _ = job.communicate(timeout=600)
    assert job.returncode == 1
    record = read_exit_record(run)
    assert record is not None and record.code == 2
    assert "the run failed 2 times at step 1 with code 7, and saved no checkpoint" in record.reason
    assert output.count("the run has ended already, and starts no more: the run failed 2") >= 1
    assert len(read_starts(run)) == 3


def wait_until(condition: Callable[[], bool], job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + _STEP_SECONDS
    while not condition():
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


# Slurm with one node. A requeued job starts again once it has ended.
_SCONTROL = """#!/bin/sh
case $1 in
show) echo localhost ;;
requeue) touch "$0.requeued" ;;
esac
"""
_SRUN = """#!/bin/sh
shift
exec "$@"
"""


class FakeSlurm:
    """A job of the real Slurm script on this machine. Its requeues are counted."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.restarts = 0
        for name, text in (("scontrol", _SCONTROL), ("srun", _SRUN)):
            (directory / name).write_text(text)
            (directory / name).chmod(0o755)

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        slurm = {
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_ID": str(os.getpid() % 10000),
            "SLURM_RESTART_COUNT": str(self.restarts),
            "TORCHRUN": str(Path(sys.executable).with_name("torchrun")),
            "NPROC": "2",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{self.directory}:{os.environ['PATH']}",
        }
        with (self.directory / "log").open("a") as log:
            return subprocess.Popen(
                ["bash", str(ROOT / "launch/slurm/train_rl.sbatch"), *overrides],
                env=os.environ | slurm,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def take_requeue(self) -> bool:
        """True if the last job was queued again."""
        mark = self.directory / "scontrol.requeued"
        if not mark.exists():
            return False
        mark.unlink()
        self.restarts += 1
        return True


def kill_rank_0(job: subprocess.Popen[str]) -> None:
    rank_process(job, 0).kill()


def kill_torchrun(job: subprocess.Popen[str]) -> None:
    torchrun_of(job).kill()


def kill_node(job: subprocess.Popen[str]) -> None:
    kill_at_once(processes_below(job))


@exact
@pytest.mark.parametrize("dtype", DTYPES)
def test_slurm_requeues_a_run_whatever_is_killed_and_it_ends_exactly(
    tmp_path: Path, reference_of: Callable[[str], Path], dtype: str
) -> None:
    reference = reference_of(dtype)
    run = tmp_path / "job"
    overrides = [
        "experiment=smoke",
        *SHORT_RUN,
        f"run.root={tmp_path}",
        "run.name=job",
        *RESUMED,
        f"model.dtype={dtype}",
    ]
    slurm = FakeSlurm(tmp_path)
    for strike, step in ((kill_rank_0, 1), (kill_torchrun, 3), (kill_node, 5)):
        job = slurm.start(*overrides)
        # Slurm starts only those again that have saved a checkpoint
        wait_until((run / f"checkpoints/iter_{step:07d}").exists, job)
        strike(job)
        job.wait(timeout=120)
        assert slurm.take_requeue(), (tmp_path / "log").read_text()[-3000:]
    job = slurm.start(*overrides)
    assert job.wait(timeout=900) == 0, (tmp_path / "log").read_text()[-3000:]
    assert not slurm.take_requeue()
    assert_equal_to(run, reference)
    ends = [start.end and start.end.code for start in read_starts(run)]
    # Ranks without a torchrun save and end, unless they miss its store before that
    assert ends[1] in (75, 7, 143)
    assert [ends[0], *ends[2:]] == [7, None, None]
