"""`launch/checkpoint.py export` chooses a complete checkpoint, and refuses before it writes."""

import errno
import io
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError

from launch import checkpoint
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.models.families import read_shape
from megatron_rl.models.parameter_count import num_parameters
from megatron_rl.records.progress import Progress
from megatron_rl.run.checkpoints.export import ExportPlan, ExportRefused, ExportRequest, plan_export
from megatron_rl.run.checkpoints.store import CheckpointStore
from tests.support.checkpoints import save_checkpoint
from tests.support.policies import TWO_DIGIT_ADDITION

JOB: Any = SimpleNamespace(rank=0, world_size=1, control_group=None)
SETTINGS = {
    "model.path": str(TWO_DIGIT_ADDITION),
    "model.dtype": "bfloat16",
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory `job` of a run with two checkpoints, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job").mkdir()
    for step in (5, 10):
        save_checkpoint(CheckpointStore(tmp_path / "job/checkpoints"), step, SETTINGS)
    return tmp_path / "job"


def plan(source: str, *, dtype: str | None = None, model: str | None = None) -> ExportPlan:
    return plan_with_log(source, dtype=dtype, model=model)[0]


def plan_with_log(
    source: str, *, dtype: str | None = None, model: str | None = None
) -> tuple[ExportPlan, str]:
    """The plan of an export, and its progress lines."""
    stream = io.StringIO()
    start = None if model is None else Path(model)
    request = ExportRequest(Path(source), Path("out"), dtype=dtype, model=start)
    return plan_export(request, JOB, Progress(0, is_enabled=True, stream=stream)), stream.getvalue()


@pytest.mark.parametrize(
    ("source", "step"),
    [("job", 10), ("job/checkpoints", 10), ("job/checkpoints/iter_0000005", 5)],
)
def test_the_source_is_a_run_or_one_checkpoint(run: Path, source: str, step: int) -> None:
    default = plan(source)
    assert (default.step, default.dtype) == (step, "bfloat16")
    assert default.model.path == SETTINGS["model.path"] and default.model.dtype == "bfloat16"
    assert plan(source, dtype="float16").dtype == "float16"


def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(run: Path) -> None:
    (run / "checkpoints/iter_0000010/tensors").write_bytes(b"tensors of step 11")
    export_plan, log = plan_with_log("job")
    assert export_plan.step == 5
    assert "iter_0000010: tensors " in log
    with pytest.raises(Failure, match="iter_0000010: tensors ") as refusal:
        plan("job/checkpoints/iter_0000010")
    assert refusal.value.exit_code == ExitCode.BAD_DATA


def test_a_start_checkpoint_that_has_moved_needs_the_option_model(
    run: Path, tmp_path: Path
) -> None:
    save_checkpoint(CheckpointStore(run / "checkpoints"), 15, SETTINGS | {"model.path": "/gone"})
    with pytest.raises(ExportRefused, match=r"model\.path='/gone'.*--model=PATH"):
        plan("job")
    shutil.copytree(TWO_DIGIT_ADDITION, tmp_path / "here")
    assert plan("job", model="here").model.path == "here"
    with pytest.raises(ExportRefused, match="--model=job"):
        plan("job", model="job")


def test_a_disk_without_space_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ExportRefused, match="--out=out: 0 MiB are free"):
        plan("job")


def test_an_export_has_the_dtype_of_the_training(run: Path) -> None:
    assert plan("job").dtype == "bfloat16"
    assert plan("job", dtype="float16").model.dtype == "bfloat16", "the weights of the checkpoint"
    assert plan("job", dtype="float32").dtype == "float32"


@pytest.mark.parametrize(
    ("dtype", "value_bytes"), [("bfloat16", 2), ("float16", 2), ("float32", 4)]
)
def test_an_export_needs_the_space_of_its_dtype(
    run: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, value_bytes: int
) -> None:
    size = value_bytes * num_parameters(read_shape(TWO_DIGIT_ADDITION))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size))
    assert plan("job", dtype=dtype).dtype == dtype
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size - 1))
    with pytest.raises(ExportRefused, match="the result takes"):
        plan("job", dtype=dtype)


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("I/O error: No space left on device (os error 28)"),
        OSError(errno.ENOSPC, "full", "x"),
    ],
)
def test_a_disk_that_fills_up_is_named(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    def fail(request: ExportRequest) -> None:
        raise error

    monkeypatch.setattr(checkpoint, "export_checkpoint", fail)
    monkeypatch.setattr(checkpoint.signal, "signal", lambda number, handler: None)
    assert checkpoint.main(["export", "job", "--out", "out"]) == ExitCode.CANNOT_WRITE
    assert "out cannot be written: the disk is full" in capsys.readouterr().err


def test_a_runtime_error_under_torchrun_means_that_another_rank_failed(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(request: ExportRequest) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(checkpoint, "export_checkpoint", fail)
    monkeypatch.setattr(checkpoint.signal, "signal", lambda number, handler: None)
    assert checkpoint.main(["export", "job", "--out", "out"]) == ExitCode.PEER_FAILED
    assert "another rank failed" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(RuntimeError):
        checkpoint.main(["export", "job", "--out", "out"])


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("--help", ("export", "merge", "torchrun", "Output")),
        ("export --help", ("CHECKPOINT", "--out", "--dtype", "--model", "--bucket-mib", "Output")),
        ("merge --help", ("--models", "--weights", "--base", "--density", "--scale", "Output")),
    ],
)
def test_help_names_every_option_and_the_output(
    capsys: pytest.CaptureFixture[str], arguments: str, names: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as exit_request:
        checkpoint.main(arguments.split())
    assert exit_request.value.code == 0
    text = capsys.readouterr().out
    assert [name for name in names if name not in text] == []
    assert "python launch/checkpoint.py" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere --out out", "nowhere: there is no such directory"),
        ("job/config.yaml --out out", "job/config.yaml: there is no such directory"),
        ("job --out job", "--out=job: this path exists"),
        ("job --out out --bucket-mib 0", "--bucket-mib=0: it must be above 0"),
        ("job --out out --bucket-mib nan", "--bucket-mib=nan: it must be above 0"),
    ],
)
def test_refusals_name_the_option(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert checkpoint.main(["export", *arguments.split()]) == ExitCode.REFUSED
    output = capsys.readouterr()
    assert message in output.err and "Traceback" not in output.err
    assert not (run.parent / "out").exists()
