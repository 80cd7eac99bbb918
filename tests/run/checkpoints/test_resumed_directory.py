"""A resumed run has one record of each step, in metrics.jsonl and in TensorBoard."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.cli import compose
from megatron_rl.config.schema import Configuration, LoggerSettings
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.run_state import LoopState
from megatron_rl.records.exit_record import read_exit_record, write_exit_record
from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.records.past_run import read_metrics, read_settings
from megatron_rl.records.run_directory import RunDirectory, RunDirectoryTaken
from megatron_rl.records.run_lock import mark_run_alive
from megatron_rl.run.checkpoints.resumed_directory import (
    claim_directory,
    is_complete,
    reopen_directory,
)
from tests.support.checkpoints import make_state


def make_configuration(root: Path, *overrides: str) -> Configuration:
    return compose(
        ["experiment=smoke", f"run.root={root}", "run.name=job", "run.resume=auto", *overrides]
    )


def position_after(step: int, **position: Any) -> LoopState:
    return make_state(step, **position).position


def write_steps(root: Path, steps: int, *, tensorboard: bool = False) -> RunDirectory:
    """The directory of a run that was killed after `steps`."""
    directory = RunDirectory.create(make_configuration(root), datetime.datetime.now())
    with MetricsLog(directory, LoggerSettings(tensorboard=tensorboard)) as metrics:
        for step in range(steps + 1):
            metrics.write(step, {"train/loss": float(step)})
    return directory


def test_records_after_the_checkpoint_are_moved(tmp_path: Path) -> None:
    directory = write_steps(tmp_path, 5)
    with directory.metrics_file.open("ab") as file:
        file.write(b'{"step": 6, "tr')  # the run was killed while it wrote this
    write_exit_record(directory.path, 143, "the run was stopped")
    c = make_configuration(tmp_path, "optimizer.lr=0.5")
    reopen_directory(c, position_after(3))
    assert [record["step"] for record in read_metrics(directory.path)] == [0, 1, 2, 3]
    lines = (directory.path / "resumed/001/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines[:2]] == [4, 5]
    assert lines[2:] == ['{"step": 6, "tr']
    assert read_exit_record(directory.path) is None


def test_changed_settings_replace_config_yaml_and_the_old_file_is_kept(tmp_path: Path) -> None:
    directory = write_steps(tmp_path, 5)
    c = make_configuration(tmp_path, "optimizer.lr=0.5")
    reopen_directory(c, position_after(3))
    assert read_settings(directory.path)["optimizer.lr"] == 0.5
    assert read_settings(directory.path / "resumed/001")["optimizer.lr"] != 0.5
    # The second time there is nothing to move
    reopen_directory(c, position_after(3))
    assert [path.name for path in (directory.path / "resumed").iterdir()] == ["001"]


def test_tensorboard_hides_the_steps_that_run_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory = write_steps(tmp_path, 5, tensorboard=True)
    with MetricsLog(directory, LoggerSettings(tensorboard=True), first_step=4) as metrics:
        metrics.write(4, {"train/loss": 40.0})
    events = EventAccumulator(str(directory.tensorboard))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert points == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40)]


def test_a_run_without_a_checkpoint_starts_again_in_its_directory(tmp_path: Path) -> None:
    directory = write_steps(tmp_path, 2, tensorboard=True)
    reopen_directory(make_configuration(tmp_path), None)
    assert read_metrics(directory.path) == []
    assert not directory.tensorboard.exists()
    assert (directory.path / "resumed/001/tensorboard").is_dir()


def test_a_living_run_cannot_be_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_steps(tmp_path, 5)
    c = make_configuration(tmp_path)
    monkeypatch.setattr("megatron_rl.run.checkpoints.resumed_directory._PATIENCE_SECONDS", 0.1)
    with mark_run_alive(directory.path), pytest.raises(RunDirectoryTaken, match="still alive"):
        claim_directory(c)
    lock = claim_directory(c)
    assert lock is not None
    # Of two processes that resume a run at the same time, one is refused
    with lock, pytest.raises(RunDirectoryTaken, match="still alive"):
        claim_directory(c)


def test_there_is_nothing_to_claim_for_a_new_run(tmp_path: Path) -> None:
    assert claim_directory(make_configuration(tmp_path)) is None


def test_a_directory_of_something_else_cannot_be_claimed(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    with pytest.raises(RunDirectoryTaken, match="not the directory of a run"):
        claim_directory(make_configuration(tmp_path))
    assert (tmp_path / "job").exists()


def test_a_run_is_complete_until_it_has_more_steps(tmp_path: Path) -> None:
    directory = write_steps(tmp_path, 5)
    c = make_configuration(tmp_path)
    position = position_after(5)
    assert not is_complete(c, directory.path, position), "it was killed just before its end"
    write_exit_record(directory.path, ExitCode.OK, "complete")
    assert is_complete(c, directory.path, position)
    longer = make_configuration(tmp_path, "train.total_steps=9")
    assert not is_complete(longer, directory.path, position)


def test_a_run_is_complete_at_its_accuracy(tmp_path: Path) -> None:
    directory = write_steps(tmp_path, 3)
    write_exit_record(directory.path, ExitCode.OK, "complete")
    position = position_after(3, accuracies=(0.1, 0.5, 0.6))
    for stop_at, is_end in ((0.5, True), (0.6, False)):
        c = make_configuration(tmp_path, f"eval.stop_at={stop_at}")
        assert is_complete(c, directory.path, position) == is_end
