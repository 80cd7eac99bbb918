"""Skips and rollbacks in real runs are bit-exact, also after a kill at any moment of a rollback.

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
DAILY = (("single", "float32"), ("ep2", "bfloat16"))
GRID = [
    pytest.param(layout, dtype, marks=() if (layout, dtype) in DAILY else pytest.mark.nightly)
    for layout in LAYOUTS
    for dtype in DTYPES
]
NAN = (
    "guard.nonfinite=rollback",
    "train.max_nonfinite_steps=2",
    "run.checkpoint_every=1",
    "run.keep_checkpoints=4",
    "train.total_steps=8",
)

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
    write_recording(
        root / "rollouts/recorded",
        read_shape(TWO_DIGIT_ADDITION),
        steps=STEPS,
        marked_steps=marked_steps,
        untrained_steps=untrained_steps,
    )
    return end_of(start(root, *overrides, **options))


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


@pytest.mark.parametrize(("layout", "dtype"), GRID)
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(
    tmp_path: Path, layout: str, dtype: str
) -> None:
    """Step 10 has a spike, and checkpoint 8 is loaded.

    The reference run does not train the batches of steps 9 and 10.
    """
    root = tmp_path / "rolled_back"
    options = {"layout": layout, "dtype": dtype}
    output = train(root, "guard.spike=rollback", marked_steps=[SPIKE], **options)
    reference_root = tmp_path / "reference"
    train(reference_root, untrained_steps=[SPIKE - 1, SPIKE], **options)
    assert_same_end(root, reference_root)
    records = metrics_of(root / "job")
    assert [record["step"] for record in records] == list(range(STEPS + 1))
    by_step = {record["step"]: record for record in records}
    assert by_step[SPIKE]["guard/rolled_back_to"] == 8
    lost_step = by_step[SPIKE - 1]
    # The engines that sampled these artificial rollouts are unknown, so they are demonstrations
    assert by_step[SPIKE]["account/rolled_back"] == lost_step["account/demonstrated"] > 0
    assert by_step[SPIKE]["guard/spike_norm"] > by_step[SPIKE]["guard/max_norm"] > 0
    assert "Rolled back to the checkpoint of step 8" in output
    names = {path.name for path in (root / "job/checkpoints").glob("iter_*")}
    assert names == {"iter_0000010", "iter_0000012"}


@pytest.mark.parametrize(("layout", "dtype"), GRID)
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


@pytest.mark.parametrize(
    ("layout", "dtype", "places"),
    [
        ("single", "float32", ("rename", "load", "commit")),
        pytest.param("single", "bfloat16", ("load",), marks=pytest.mark.nightly),
        pytest.param("ep2", "float32", ("rename",), marks=pytest.mark.nightly),
        pytest.param("ep2", "bfloat16", ("load",), marks=pytest.mark.nightly),
        pytest.param("ep2", "bfloat16", ("commit",), marks=pytest.mark.nightly),
    ],
)
def test_a_run_that_is_killed_during_a_rollback_ends_like_an_undisturbed_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    dtype: str,
    places: tuple[str, ...],
) -> None:
    """NaN in steps 5 and 6: checkpoint 3 is loaded, and 4 and 5 are gone before it is."""
    options: dict[str, Any] = {"layout": layout, "dtype": dtype, "action": "nan"}
    reference_root = tmp_path / "undisturbed"
    train(reference_root, *NAN, marked_steps=[5, 6], **options)
    reference = metrics_of(reference_root / "job")
    assert [record["step"] for record in reference] == list(range(9))
    assert [record.get("guard/rolled_back_to") for record in reference][6] == 3
    for place in places:
        root = tmp_path / place
        kill(root, place, monkeypatch, **options)
        output = end_of(start(root, *NAN, "run.resume=auto", **options))
        assert "resuming after step 3" in output
        assert metrics_of(root / "job") == reference
        assert_same_end(root, reference_root, 8)


def kill(root: Path, place: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Train until the plugin kills rank 0 at a place. No bad checkpoint is left."""
    write_recording(
        root / "rollouts/recorded",
        read_shape(TWO_DIGIT_ADDITION),
        steps=STEPS,
        marked_steps=[5, 6],
    )
    with monkeypatch.context() as environment:
        environment.setenv("KILL_AT", place)
        job = start(root, *NAN, **options)
    output, _ = job.communicate(timeout=300)
    assert job.returncode != 0, output[-4000:]
    is_late = place == "commit"
    assert ("Rolled back to the checkpoint of step 3" in output) == is_late
    names = {path.name for path in (root / "job/checkpoints").glob("iter_*") if not path.suffix}
    assert max(names) == "iter_0000003", "a resumed run begins there"


def test_weights_with_nan_are_rolled_back_before_engines_could_get_them(tmp_path: Path) -> None:
    output = train(
        tmp_path,
        *NAN,
        marked_steps=[5],
        layout="single",
        dtype="float32",
        action="poison",
    )
    assert "step 5: NaN or Inf in the weights. Rolled back to the checkpoint of step 4" in output
    assert metrics_of(tmp_path / "job")[-1]["step"] == 8


def test_a_rollback_without_progress_ends_with_code_5(tmp_path: Path) -> None:
    """Every batch has NaN from step 3 on: the steps before are used up."""
    write_recording(
        tmp_path / "rollouts/recorded",
        read_shape(TWO_DIGIT_ADDITION),
        steps=STEPS,
        marked_steps=range(3, STEPS + 1),
    )
    job = start(tmp_path, *NAN, layout="single", dtype="float32", action="nan")
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 5, output[-4000:]
    record = read_exit_record(tmp_path / "job")
    assert record is not None and record.code == 5
    assert "with other weights than the present ones" in record.reason
