"""A run that is killed and goes on ends bit for bit where one ends that was never killed."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from launch.testbed.jobs import kill, process_tree, start_job, wait_for_step
from launch.testbed.policies import TWO_DIGIT_ADDITION
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.models.families import read_shape
from megatron_rl.records.exit_record import read_exit_record
from megatron_rl.run.checkpoints.manifest import read_manifest
from megatron_rl.run.checkpoints.state_file import read_state
from tests.support.comparable import assert_same_weights, metrics_of
from tests.support.recordings import write_recording

STEPS, EVERY = 6, 2

pytestmark = [pytest.mark.distributed, pytest.mark.chaos, pytest.mark.timeout(600)]


def train_only(
    root: Path, recording: Path, *overrides: str, ranks: int = 2
) -> subprocess.Popen[str]:
    return start_job(
        root,
        "mode=train_only",
        f"rollout.recording={recording}",
        f"train.total_steps={STEPS}",
        "train.max_route_disagreement=1",
        "run.save_weights=true",
        f"run.checkpoint_every={EVERY}",
        "logger.progress=true",
        *overrides,
        ranks=ranks,
    )


def end_of(job: subprocess.Popen[str]) -> str:
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 0, output[-4000:]
    return output


def wait_for_its_second_save(checkpoints: Path, job: subprocess.Popen[str]) -> list[psutil.Process]:
    """Returns the processes of the job: to find them may take as long as a save."""
    first = checkpoints / f"iter_{EVERY:07d}"
    wait_until(first.exists, job)
    processes = process_tree(job)
    wait_until(lambda: any(checkpoints.glob("*.staged/*.distcp")), job)
    return processes


def wait_until(condition: Callable[[], bool], job: subprocess.Popen[str]) -> None:
    while not condition():
        assert job.poll() is None
        time.sleep(0.002)


@pytest.mark.parametrize("layout", ["ep2", "pp2", "cp2"])
def test_killed_and_resumed_equals_never_killed(tmp_path: Path, layout: str) -> None:
    write_recording(tmp_path / "rollouts/recorded", read_shape(TWO_DIGIT_ADDITION), steps=STEPS)
    never, killed = tmp_path / "never", tmp_path / "killed"
    end_of(train_only(never, tmp_path / "rollouts", f"parallel={layout}"))
    again = (killed, tmp_path / "rollouts", f"parallel={layout}", "run.background_saves=true")
    job = train_only(*again)
    kill(job, wait_for_its_second_save(killed / "job/checkpoints", job))
    assert list((killed / "job/checkpoints").glob("*.staged")), "it was killed while it saved"
    saved = sorted(path.name for path in (killed / "job/checkpoints").glob("iter_???????"))
    assert saved and saved[-1] < f"iter_{STEPS:07d}", "it was killed before its end"
    output = end_of(train_only(*again, "run.resume=auto"))
    assert f"going on after step {int(saved[-1][5:])}" in output
    assert [record["step"] for record in metrics_of(killed / "job")] == list(range(STEPS + 1))
    assert metrics_of(killed / "job") == metrics_of(never / "job")
    assert_same_weights(killed / "job", never / "job", STEPS)
    manifests = [
        read_manifest(root / f"job/checkpoints/iter_{STEPS:07d}").files for root in (never, killed)
    ]
    states = [
        {n: r for n, r in files.items() if n.endswith((".distcp", ".safetensors"))}
        for files in manifests
    ]
    assert len(states[0]) >= 4 and states[0] == states[1], (
        "the optimizer's state and random numbers too"
    )


def test_a_run_that_is_told_to_stop_saves_and_ends_with_its_own_code(tmp_path: Path) -> None:
    many = 20 * STEPS  # it is told long before their end
    write_recording(tmp_path / "rollouts/recorded", read_shape(TWO_DIGIT_ADDITION), steps=many)
    settings = (f"train.total_steps={many}", "run.checkpoint_every=1000", "run.keep_checkpoints=9")
    job = train_only(tmp_path, tmp_path / "rollouts", *settings, ranks=1)
    wait_for_step(tmp_path / "job", 1, job)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=120)
    ended = read_exit_record(tmp_path / "job")
    assert (
        job.returncode == ExitCode.REQUEUE and ended is not None and ended.code == ExitCode.REQUEUE
    ), output[-4000:]
    (saved,) = (tmp_path / "job/checkpoints").iterdir()
    steps = [record["step"] for record in metrics_of(tmp_path / "job")]
    assert read_state(saved).step == steps[-1] < many and f"after step {steps[-1]}" in output
