"""A resumed run has one record of each step, in metrics.jsonl and in TensorBoard."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.run_state import LoopState
from megatron_rl.records.exit_record import read_exit_record, write_exit_record
from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.records.past_run import read_metrics, read_settings
from megatron_rl.records.run_directory import RunDirectory, to_yaml
from megatron_rl.records.run_lock import mark_run_alive
from megatron_rl.records.samples.files import sample_steps
from megatron_rl.run.checkpoints.resumed_directory import (
    claim_directory,
    is_complete,
    reopen_directory,
)
from megatron_rl.run.features.tensorboard.tensorboard import TensorBoard
from tests.support.checkpoints import make_state
from tests.support.configurations import configuration_of
from tests.support.disk_log import DiskLog
from tests.support.past_runs import make_run_directory
from tests.support.samples import make_sample, write_step


def make_configuration(root: Path, *overrides: str) -> Configuration:
    return configuration_of(
        ["experiment=smoke", f"run.root={root}", "run.name=job", "run.resume=auto", *overrides]
    )


def position_after(step: int, **position: Any) -> LoopState:
    return make_state(step, **position).position


def write_steps(root: Path, steps: int, *, tensorboard: bool = False) -> RunDirectory:
    """The directory of a run that was killed after `steps`."""
    directory = make_run_directory(make_configuration(root))
    with MetricsLog(directory) as metrics:
        for step in range(steps + 1):
            metrics.write(step, {"train/loss": float(step)})
    if tensorboard:
        write_to_tensorboard(directory, {step: float(step) for step in range(steps + 1)})
    return directory


def write_to_tensorboard(
    directory: RunDirectory, losses: Mapping[int, float], first_step: int | None = None
) -> None:
    with contextlib.closing(TensorBoard(directory, first_step)) as tensorboard:
        for step, loss in losses.items():
            tensorboard.write(step, {"train/loss": loss})


def test_records_after_the_checkpoint_are_moved(tmp_path: Path) -> None:
    directory = write_steps(tmp_path, 5)
    with directory.metrics_file.open("ab") as file:
        file.write(b'{"step": 6, "tr')  # the run was killed while it wrote this
    write_exit_record(directory.path, 143, "the run was stopped")
    c = make_configuration(tmp_path, "optimizer.lr=0.5")
    reopen_directory(directory, to_yaml(c), position_after(3))
    assert [record["step"] for record in read_metrics(directory.path)] == [0, 1, 2, 3]
    lines = (directory.path / "resumed/001/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines[:2]] == [4, 5]
    assert lines[2:] == ['{"step": 6, "tr']
    assert read_exit_record(directory.path) is None


@pytest.mark.slow
def test_samples_after_the_checkpoint_are_moved(tmp_path: Path) -> None:
    """The checkpoint's step keeps its samples, even if its evaluation is still to be done."""
    directory = write_steps(tmp_path, 5)
    for step in (1, 3, 5):
        write_step(directory.path, step, [make_sample(step=step)])
    settings = to_yaml(make_configuration(tmp_path))
    reopen_directory(directory, settings, position_after(3, unevaluated_metrics={"a": 1.0}))
    assert sample_steps(directory.path) == [1, 3]
    assert sample_steps(directory.path / "resumed/001") == [5]
    reopen_directory(directory, settings, None)
    assert sample_steps(directory.path) == []
    assert sample_steps(directory.path / "resumed/002") == [1, 3]


def test_the_record_of_a_step_that_owes_its_evaluation_is_written_again(tmp_path: Path) -> None:
    directory = write_steps(tmp_path, 5)
    settings = to_yaml(make_configuration(tmp_path))
    position = position_after(3, unevaluated_metrics={"train/loss": 3.0})
    reopen_directory(directory, settings, position)
    assert [record["step"] for record in read_metrics(directory.path)] == [0, 1, 2]
    moved_records = read_metrics(directory.path / "resumed/001")
    assert [record["step"] for record in moved_records] == [3, 4, 5]


def test_signs_of_the_end_of_a_run_are_moved(tmp_path: Path) -> None:
    """A `stop` that remains would end the resumed run at once."""
    directory = write_steps(tmp_path, 3)
    write_exit_record(directory.path, 143, "the run was stopped")
    names = ["exit.json", "left_out.txt", "stop"]
    for name in names[1:]:
        (directory.path / name).touch()
    (directory.path / "logs").rmdir()
    reopen_directory(directory, to_yaml(make_configuration(tmp_path)), position_after(3))
    assert not any((directory.path / name).exists() for name in names)
    assert {path.name for path in (directory.path / "resumed/001").iterdir()} == set(names)
    assert (directory.path / ".exit-reserve").stat().st_size > 0
    assert directory.logs.is_dir()


def test_records_are_on_the_disk_twice_before_one_copy_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_steps(tmp_path, 5)
    settings = to_yaml(make_configuration(tmp_path, "optimizer.lr=0.5"))
    log = DiskLog(monkeypatch)
    reopen_directory(directory, settings, position_after(3))
    assert log.is_in_order(
        ("sync", directory.path / "resumed/001/metrics.jsonl"),
        ("rename", directory.metrics_file),
    )
    for file in (directory.metrics_file, directory.path / "config.yaml"):
        partial = file.with_name(f"{file.name}.partial")
        assert log.is_in_order(("sync", partial), ("rename", file))


def test_a_record_without_its_line_end_is_moved(tmp_path: Path) -> None:
    """The next record would be appended to the same line."""
    directory = write_steps(tmp_path, 2)
    with directory.metrics_file.open("ab") as file:
        file.write(b'{"step": 3}')
    reopen_directory(directory, to_yaml(make_configuration(tmp_path)), position_after(3))
    assert [record["step"] for record in read_metrics(directory.path)] == [0, 1, 2]
    assert directory.metrics_file.read_bytes().endswith(b"\n")


def test_a_record_that_cannot_be_read_is_moved(tmp_path: Path) -> None:
    directory = write_steps(tmp_path, 2)
    with directory.metrics_file.open("ab") as file:
        file.write(b"nonsense\n")
    reopen_directory(directory, to_yaml(make_configuration(tmp_path)), position_after(9))
    assert [record["step"] for record in read_metrics(directory.path)] == [0, 1, 2]
    assert (directory.path / "resumed/001/metrics.jsonl").read_text() == "nonsense\n"


def test_every_resume_has_a_folder_of_its_own(tmp_path: Path) -> None:
    directory = write_steps(tmp_path, 5)
    settings = to_yaml(make_configuration(tmp_path))
    (directory.path / "resumed/007").mkdir(parents=True)
    (directory.path / "resumed/007/metrics.jsonl").write_text("of an earlier resume")
    reopen_directory(directory, settings, position_after(3))
    assert {path.name for path in (directory.path / "resumed").iterdir()} == {"007", "008"}
    assert (directory.path / "resumed/007/metrics.jsonl").read_text() == "of an earlier resume"


def test_changed_settings_replace_config_yaml_and_the_old_file_is_kept(tmp_path: Path) -> None:
    directory = write_steps(tmp_path, 5)
    c = make_configuration(tmp_path, "optimizer.lr=0.5")
    reopen_directory(directory, to_yaml(c), position_after(3))
    assert read_settings(directory.path)["optimizer.lr"] == 0.5
    assert read_settings(directory.path / "resumed/001")["optimizer.lr"] != 0.5
    # The second time there is nothing to move
    reopen_directory(directory, to_yaml(c), position_after(3))
    assert [path.name for path in (directory.path / "resumed").iterdir()] == ["001"]


def test_tensorboard_hides_the_steps_that_run_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory = write_steps(tmp_path, 5, tensorboard=True)
    write_to_tensorboard(directory, {4: 40.0}, first_step=4)
    events = EventAccumulator(str(directory.tensorboard))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert points == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40)]


def test_a_run_without_a_checkpoint_starts_again_in_its_directory(tmp_path: Path) -> None:
    directory = write_steps(tmp_path, 2, tensorboard=True)
    reopen_directory(directory, to_yaml(make_configuration(tmp_path)), None)
    assert read_metrics(directory.path) == []
    assert not directory.tensorboard.exists()
    assert (directory.path / "resumed/001/tensorboard").is_dir()


def test_a_living_run_cannot_be_claimed(tmp_path: Path) -> None:
    directory = write_steps(tmp_path, 5)
    with mark_run_alive(directory.path), pytest.raises(Failure, match="still alive"):
        claim_directory(tmp_path / "job", patience_seconds=0.1)
    lock = claim_directory(tmp_path / "job")
    assert lock is not None
    # Of two processes that resume a run at the same time, one is refused
    with lock, pytest.raises(Failure, match="still alive"):
        claim_directory(tmp_path / "job", patience_seconds=0.1)


def test_there_is_nothing_to_claim_for_a_new_run(tmp_path: Path) -> None:
    assert claim_directory(tmp_path / "job") is None


def test_a_directory_of_something_else_cannot_be_claimed(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    with pytest.raises(Failure, match="not the directory of a run"):
        claim_directory(tmp_path / "job")
    assert (tmp_path / "job").exists()


@pytest.mark.slow
def test_a_run_is_complete_until_it_has_more_steps(tmp_path: Path) -> None:
    directory = write_steps(tmp_path, 5)
    c = make_configuration(tmp_path)
    position = position_after(5)
    assert not is_complete(directory.path, position, c.train, c.eval), (
        "it was killed just before its end"
    )
    write_exit_record(directory.path, ExitCode.CANNOT_WRITE, "its weights were not saved")
    assert not is_complete(directory.path, position, c.train, c.eval)
    (directory.path / "exit.json").unlink()
    write_exit_record(directory.path, ExitCode.OK, "complete")
    assert is_complete(directory.path, position, c.train, c.eval)
    longer = make_configuration(tmp_path, "train.total_steps=9")
    assert not is_complete(directory.path, position, longer.train, longer.eval)


@pytest.mark.slow
def test_a_run_is_complete_at_its_accuracy(tmp_path: Path) -> None:
    directory = write_steps(tmp_path, 3)
    write_exit_record(directory.path, ExitCode.OK, "complete")
    position = position_after(3, accuracies=(0.1, 0.5, 0.6))
    for stop_at, is_end in ((0.5, True), (0.6, False)):
        c = make_configuration(tmp_path, f"eval.stop_at={stop_at}")
        assert is_complete(directory.path, position, c.train, c.eval) == is_end


@pytest.mark.parametrize(("accuracy", "is_end"), [(0.6, True), (0.3, False), (None, False)])
def test_a_run_that_ended_by_an_evaluation_it_owed_is_complete(
    tmp_path: Path, accuracy: float | None, is_end: bool
) -> None:
    """The checkpoint was saved before that evaluation. metrics.jsonl has its result."""
    directory = write_steps(tmp_path, 2)
    with MetricsLog(directory) as metrics:
        metrics.write(3, {} if accuracy is None else {"eval/accuracy": accuracy})
    write_exit_record(directory.path, ExitCode.OK, "complete")
    position = position_after(3, accuracies=(0.1, 0.5), unevaluated_metrics={"train/loss": 3.0})
    c = make_configuration(tmp_path, "eval.stop_at=0.55")
    assert is_complete(directory.path, position, c.train, c.eval) == is_end
