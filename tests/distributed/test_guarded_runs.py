"""Skipped updates, and what a run that a guard has stopped resumes from, are bit-exact.

The runs train on recordings. A marker in a batch makes its loss go wrong.
"""

import os
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.models.families import read_shape
from megatron_rl.records.exit_record import read_exit_record
from megatron_rl.run.checkpoints.manifest import read_manifest
from tests.support.comparable import assert_same_weights, metrics_of
from tests.support.jobs import start_job
from tests.support.policies import TWO_DIGIT_ADDITION
from tests.support.recordings import write_recording

PLUGINS = Path(__file__).with_name("plugins")
STEPS = 12
SPIKE = 10
TENSOR_FILES = (".distcp", ".safetensors")
LAYOUTS = ("single", "ep2", "pp2", "tp2_ep2")
DTYPES = ("float32", "bfloat16")
FAULTS = {
    "float32": ("poison", "step 5: NaN or Inf in the weights"),
    "bfloat16": ("not_finite", "1 step had NaN or Inf in the loss or the gradients"),
}


def grid(daily: tuple[str, str]) -> list[Any]:
    """Every layout and precision, of which one is daily and the others are nightly."""
    return [
        pytest.param(layout, dtype, marks=() if (layout, dtype) == daily else pytest.mark.nightly)
        for layout in LAYOUTS
        for dtype in DTYPES
    ]


pytestmark = [pytest.mark.distributed, pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def _plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS), prepend=os.pathsep)


def start(
    root: Path, *overrides: str, layout: str, dtype: str, action: str = "spike"
) -> subprocess.Popen[str]:
    """Train on the recording in `root`."""
    return start_job(
        root,
        "mode=train_only",
        f"rollout.recording={root / 'rollouts'}",
        f"train.total_steps={STEPS}",
        "train.optimizer_steps_per_batch=1",
        "train.max_route_disagreement=1",
        "run.save_weights=true",
        "samples.every=0",
        "run.checkpoint_every=4",
        "logger.progress=true",
        "algo=custom",
        "algo.name=planted_numbers:PlantedNumbers",
        f"algo.options={{action: {action}}}",
        f"parallel={layout}",
        f"model.dtype={dtype}",
        *overrides,
        ranks=1 if layout == "single" else 2,
    )


def train(
    root: Path,
    *overrides: str,
    marked_steps: Collection[int] = (),
    untrained_steps: Collection[int] = (),
    **options: Any,
) -> str:
    """Write a recording, train on it to the end, and return what was printed."""
    write(root, marked_steps=marked_steps, untrained_steps=untrained_steps)
    return end_of(start(root, *overrides, **options))


def write(root: Path, **steps: Collection[int]) -> None:
    """Write the recording of `STEPS` steps in `root`."""
    shape = read_shape(TWO_DIGIT_ADDITION)
    write_recording(root / "rollouts/recorded", shape, steps=STEPS, **steps)


def end_of(job: subprocess.Popen[str]) -> str:
    output, _ = job.communicate(timeout=400)
    assert job.returncode == 0, output[-4000:]
    return output


def tensor_files(root: Path, step: int) -> dict[str, Any]:
    """Return the hashes of weights, optimizer and random numbers of a checkpoint."""
    files = read_manifest(root / f"job/checkpoints/iter_{step:07d}").files
    return {name: record for name, record in files.items() if name.endswith(TENSOR_FILES)}


def assert_same_end(root: Path, reference_root: Path, step: int = STEPS) -> None:
    assert_same_weights(root / "job", reference_root / "job", step)
    files = tensor_files(root, step)
    assert len(files) >= 2 and files == tensor_files(reference_root, step)


@pytest.mark.parametrize(("layout", "dtype"), grid(("single", "bfloat16")))
def test_a_skipped_update_leaves_no_trace(tmp_path: Path, layout: str, dtype: str) -> None:
    """The reference run does not train the batch of step 10."""
    root = tmp_path / "skipped"
    options = {"layout": layout, "dtype": dtype}
    train(root, "guard.spike=skip", marked_steps=[SPIKE], **options)
    reference_root = tmp_path / "reference"
    train(reference_root, untrained_steps=[SPIKE], **options)
    assert_same_end(root, reference_root)
    skips = [record.get("guard/skipped") for record in metrics_of(root / "job")]
    assert skips[1:] == [0.0] * 9 + [1.0] + [0.0] * 2
    assert (root / f"job/rollouts/spike-step-{SPIKE}").is_dir()


@pytest.mark.parametrize(("layout", "dtype"), grid(("single", "float32")))
def test_a_run_that_nan_has_stopped_resumes_from_weights_without_it(
    tmp_path: Path, layout: str, dtype: str
) -> None:
    """NaN appears in step 5: in the weights, or in the loss. The reference run has no such fault.

    With bfloat16, the optimizer would overwrite the weights with its own float32 ones.
    """
    options: dict[str, Any] = {"layout": layout, "dtype": dtype}
    action, fault = FAULTS[dtype]
    root = tmp_path / "stopped"
    guard = ("guard.nonfinite=stop", "run.checkpoint_every=1")
    write(root, marked_steps=[5])
    job = start(root, *guard, action=action, **options)
    output, _ = job.communicate(timeout=400)
    assert job.returncode != 0, output[-4000:]
    record = read_exit_record(root / "job")
    assert record is not None and record.code == 5
    assert f"{fault} (guard.nonfinite=stop)" in record.reason
    assert "run.resume=auto goes on after step 4" in record.reason
    output = end_of(start(root, *guard, "run.resume=auto", action="nothing", **options))
    assert "resuming after step 4" in output
    reference_root = tmp_path / "reference"
    write(reference_root, marked_steps=[5])
    end_of(start(reference_root, *guard, action="nothing", **options))
    assert_same_end(root, reference_root)
