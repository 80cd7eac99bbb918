"""A killed and resumed run ends bit for bit like an uninterrupted one."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.models.families import read_shape
from megatron_rl.records.exit_record import read_exit_record
from megatron_rl.run.checkpoints.manifest import read_manifest
from megatron_rl.run.checkpoints.state_file import read_state
from tests.support.comparable import assert_same_weights, metrics_of
from tests.support.jobs import kill, process_tree, start_job, wait_for_step
from tests.support.policies import TWO_DIGIT_ADDITION
from tests.support.recordings import write_recording

STEPS = 6
EVERY = 2
LAYOUTS = ("ep2", "pp2", "cp2", "tp2_ep2")
DAILY = ("ep2", "bfloat16")
TENSOR_FILES = (".distcp", ".safetensors")

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
        "samples.every=1",
        f"run.checkpoint_every={EVERY}",
        "logger.progress=true",
        *overrides,
        ranks=ranks,
    )


def end_of(job: subprocess.Popen[str]) -> str:
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 0, output[-4000:]
    return output


def kill_during_second_save(root: Path, job: subprocess.Popen[str]) -> bool:
    """Kill a job while it saves for the second time. Returns False if it was too late for this.

    A save takes a fraction of a second, in which another process may hold this one up. The
    processes are listed before it, because that may take as long.
    """
    checkpoints = root / "job/checkpoints"
    if not wait_until((checkpoints / f"iter_{EVERY:07d}").exists, job):
        return False
    processes = process_tree(job)
    wait_until(lambda: any(checkpoints.glob("*.staged/*.distcp")), job)
    kill(job, processes)
    return any(checkpoints.glob("*.staged"))


def wait_until(condition: Callable[[], bool], job: subprocess.Popen[str]) -> bool:
    """Wait for a condition. Returns False if the job ends before."""
    while not condition():
        if job.poll() is not None:
            return False
        time.sleep(0.002)
    return True


def state_files(root: Path) -> dict[str, Any]:
    """Return the manifest's records of the tensor files of the last checkpoint."""
    files = read_manifest(root / f"job/checkpoints/iter_{STEPS:07d}").files
    return {name: record for name, record in files.items() if name.endswith(TENSOR_FILES)}


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        DAILY,
        *(
            pytest.param(layout, dtype, marks=pytest.mark.nightly)
            for layout in LAYOUTS
            for dtype in ("float32", "bfloat16")
            if (layout, dtype) != DAILY
        ),
    ],
)
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, layout: str, dtype: str
) -> None:
    recording = tmp_path / "rollouts"
    write_recording(recording / "recorded", read_shape(TWO_DIGIT_ADDITION), steps=STEPS)
    reference_root = tmp_path / "reference"
    settings = (f"parallel={layout}", f"model.dtype={dtype}")
    end_of(train_only(reference_root, recording, *settings))
    for attempt in range(3):
        root = tmp_path / f"killed-{attempt}"
        job = train_only(root, recording, *settings, "run.background_saves=true")
        if kill_during_second_save(root, job):
            break
    else:
        pytest.fail("no job was killed during its second save")
    checkpoints = root / "job/checkpoints"
    last_checkpoint = max(path.name for path in checkpoints.glob("iter_???????"))
    assert last_checkpoint < f"iter_{STEPS:07d}", "the job was killed before its end"
    output = end_of(
        train_only(root, recording, *settings, "run.background_saves=true", "run.resume=auto")
    )
    assert f"after step {int(last_checkpoint[5:])}" in output
    assert_same_run(root, reference_root)


def sample_files(root: Path) -> dict[str, bytes]:
    """Return the samples that the run keeps. Those of the dead end are in `resumed/`."""
    return {file.name: file.read_bytes() for file in (root / "job/samples").iterdir()}


def assert_same_run(root: Path, reference_root: Path) -> None:
    metrics = metrics_of(root / "job")
    assert [record["step"] for record in metrics] == list(range(STEPS + 1))
    assert metrics == metrics_of(reference_root / "job")
    assert_same_weights(root / "job", reference_root / "job", STEPS)
    # With the state of the optimizer and of the random generators
    files = state_files(root)
    assert len(files) >= 4 and files == state_files(reference_root)
    files = sample_files(root)
    assert len(files) == STEPS and files == sample_files(reference_root)


def test_a_stopped_run_saves_a_checkpoint_and_requests_a_requeue(tmp_path: Path) -> None:
    many = 20 * STEPS  # the signal comes long before the end
    write_recording(tmp_path / "rollouts/recorded", read_shape(TWO_DIGIT_ADDITION), steps=many)
    settings = (f"train.total_steps={many}", "run.checkpoint_every=1000", "run.keep_checkpoints=9")
    job = train_only(tmp_path, tmp_path / "rollouts", *settings, ranks=1)
    wait_for_step(tmp_path / "job", 1, job)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=120)
    exit_record = read_exit_record(tmp_path / "job")
    assert (
        job.returncode == ExitCode.REQUEUE
        and exit_record is not None
        and exit_record.code == ExitCode.REQUEUE
    ), output[-4000:]
    (checkpoint,) = (tmp_path / "job/checkpoints").iterdir()
    steps = [record["step"] for record in metrics_of(tmp_path / "job")]
    assert read_state(checkpoint).step == steps[-1] < many and f"after step {steps[-1]}" in output
