"""`launch/export_hf.py`: which checkpoint it takes, and what it refuses before it writes."""

import argparse
import errno
import io
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.records.progress import Progress
from megatron_rl.run.checkpoints.store import CheckpointStore
from tests.support.checkpoints import save_checkpoint
from tests.support.policies import TWO_DIGIT_ADDITION
from tests.support.scripts import load_script

JOB: Any = SimpleNamespace(rank=0, world_size=1, control_group=None)
SETTINGS = {
    "model.path": str(TWO_DIGIT_ADDITION),
    "model.dtype": "bfloat16",
    "run.save_dtype": None,
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("export_hf")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's directory `job` with two checkpoints, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job").mkdir()
    for step in (5, 10):
        save_checkpoint(CheckpointStore(tmp_path / "job/checkpoints"), step, SETTINGS)
    return tmp_path / "job"


def plan(script: ModuleType, *arguments: str) -> tuple[Any, str]:
    """What would be exported, and what is said."""
    said = io.StringIO()
    options: argparse.Namespace = script.parse([*arguments, "--out", "out"])
    return script.make_plan(options, JOB, Progress(0, enabled=True, stream=said)), said.getvalue()


@pytest.mark.parametrize(
    ("given", "step"),
    [("job", 10), ("job/checkpoints", 10), ("job/checkpoints/iter_0000005", 5)],
)
def test_a_run_or_one_of_its_checkpoints_is_taken(
    script: ModuleType, run: Path, given: str, step: int
) -> None:
    found, _ = plan(script, given)
    assert (found.step, found.dtype) == (step, "bfloat16")
    assert found.model.path == SETTINGS["model.path"] and found.model.dtype == "bfloat16"
    assert plan(script, given, "--dtype", "float16")[0].dtype == "float16"


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(
    script: ModuleType, run: Path
) -> None:
    (run / "checkpoints/iter_0000010/tensors").write_bytes(b"tensors of step 11")
    found, said = plan(script, "job")
    assert found.step == 5 and "iter_0000010: tensors is not what was saved" in said
    with pytest.raises(
        script.BadCheckpoint, match="iter_0000010: tensors is not what was saved"
    ) as refused:
        plan(script, "job/checkpoints/iter_0000010")
    assert refused.value.exit_code == ExitCode.BAD_DATA


def test_a_start_checkpoint_that_has_moved_is_asked_for(
    script: ModuleType, run: Path, tmp_path: Path
) -> None:
    save_checkpoint(CheckpointStore(run / "checkpoints"), 15, SETTINGS | {"model.path": "/gone"})
    with pytest.raises(
        script.ExportRefused,
        match=r"model\.path='/gone', of the checkpoint's settings.*--model=PATH",
    ):
        plan(script, "job")
    shutil.copytree(TWO_DIGIT_ADDITION, tmp_path / "here")
    assert plan(script, "job", "--model", "here")[0].model.path == "here"
    with pytest.raises(script.ExportRefused, match="--model=job"):
        plan(script, "job", "--model", "job")


def test_a_disk_without_room_is_refused(
    script: ModuleType, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(script.ExportRefused, match="--out=out: 0 MiB are free there, and it takes"):
        plan(script, "job")


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("I/O error: No space left on device (os error 28)"),
        OSError(errno.ENOSPC, "full", "x"),
    ],
)
def test_a_disk_that_fills_up_is_named(
    script: ModuleType,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    def full(options: argparse.Namespace) -> None:
        raise error

    monkeypatch.setattr(script, "export", full)
    monkeypatch.setattr(script.signal, "signal", lambda *given: None)
    assert script.main(["job", "--out", "out"]) == ExitCode.CANNOT_WRITE
    assert (
        "out cannot be written: the disk is full. Make room there, or give another --out"
        in capsys.readouterr().err
    )


def test_the_help_names_every_option(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        script.main(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(
        option in said
        for option in ("CHECKPOINT", "--out", "--dtype", "--model", "--bucket-mib", "torchrun")
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere --out out", "nowhere: there is no such directory"),
        ("job/config.yaml --out out", "job/config.yaml: there is no such directory"),
        ("job --out job", "--out=job: it exists"),
        ("job --out out --bucket-mib 0", "--bucket-mib=0: it must be above 0"),
        ("job --out out --bucket-mib nan", "--bucket-mib=nan: it must be above 0"),
    ],
)
def test_refusals_name_the_option(
    script: ModuleType, run: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert script.main(arguments.split()) == ExitCode.REFUSED
    said = capsys.readouterr()
    assert message in said.err and "Traceback" not in said.err
    assert not (run.parent / "out").exists()
