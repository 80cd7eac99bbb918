"""A run that goes on has every step once, in metrics.jsonl and in TensorBoard."""

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
from megatron_rl.run.checkpoints.resumed_directory import claim_directory, reopen_directory
from tests.support.checkpoints import make_state


def configured(root: Path, *overrides: str) -> Configuration:
    return compose(
        ["experiment=smoke", f"run.root={root}", "run.name=job", "run.resume=auto", *overrides]
    )


def after(step: int, **position: Any) -> LoopState:
    return make_state(step, **position).position


def run_of_steps(root: Path, steps: int, *, tensorboard: bool = False) -> RunDirectory:
    import datetime

    directory = RunDirectory.create(configured(root), datetime.datetime.now())
    with MetricsLog(directory, LoggerSettings(tensorboard=tensorboard)) as log:
        for step in range(steps + 1):
            log.write(step, {"train/loss": float(step)})
    return directory


def test_steps_after_the_checkpoint_are_cut_and_kept_aside(tmp_path: Path) -> None:
    directory = run_of_steps(tmp_path, 5)
    with directory.metrics_file.open("ab") as file:
        file.write(b'{"step": 6, "tr')  # killed while it wrote
    write_exit_record(directory.path, 143, "told to stop")
    reopen_directory(configured(tmp_path, "optimizer.lr=0.5"), after(3))
    assert [record["step"] for record in read_metrics(directory.path)] == [0, 1, 2, 3]
    aside = (directory.path / "resumed/001/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in aside[:2]] == [4, 5] and aside[2:] == [
        '{"step": 6, "tr'
    ]
    assert read_exit_record(directory.path) is None
    assert read_settings(directory.path)["optimizer.lr"] == 0.5
    assert read_settings(directory.path / "resumed/001")["optimizer.lr"] != 0.5
    reopen_directory(configured(tmp_path, "optimizer.lr=0.5"), after(3))
    assert [path.name for path in (directory.path / "resumed").iterdir()] == ["001"], (
        "there was nothing to keep aside"
    )


def test_tensorboard_hides_the_steps_that_are_done_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory = run_of_steps(tmp_path, 5, tensorboard=True)
    with MetricsLog(directory, LoggerSettings(tensorboard=True), first_step=4) as log:
        log.write(4, {"train/loss": 40.0})
    events = EventAccumulator(str(directory.tensorboard))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 40),
    ]


def test_a_run_without_a_checkpoint_begins_again_in_its_directory(tmp_path: Path) -> None:
    directory = run_of_steps(tmp_path, 2, tensorboard=True)
    reopen_directory(configured(tmp_path), None)
    assert read_metrics(directory.path) == [] and not directory.tensorboard.exists()
    assert (directory.path / "resumed/001/tensorboard").is_dir()


def test_a_living_run_is_waited_for_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, c = run_of_steps(tmp_path, 5), configured(tmp_path)
    monkeypatch.setattr("megatron_rl.run.checkpoints.resumed_directory._PATIENCE_SECONDS", 0.1)
    with mark_run_alive(directory.path), pytest.raises(RunDirectoryTaken, match="still alive"):
        claim_directory(c)
    claimed = claim_directory(c)
    assert claimed is not None
    with claimed, pytest.raises(RunDirectoryTaken, match="still alive"):
        claim_directory(c)  # two starts at the same time: one of them goes on
    assert claim_directory(configured(tmp_path, "run.name=new")) is None


def test_a_complete_run_is_refused_until_it_is_given_more_to_do(tmp_path: Path) -> None:
    directory = run_of_steps(tmp_path, 5)
    reopen_directory(configured(tmp_path), after(5))  # it was killed before its very end
    write_exit_record(directory.path, ExitCode.OK, "complete")
    with pytest.raises(RunDirectoryTaken, match=r"complete; raise train\.total_steps"):
        reopen_directory(configured(tmp_path), after(5))
    reopen_directory(configured(tmp_path, "train.total_steps=9"), after(5))


def test_a_run_that_an_accuracy_ended_is_complete_until_more_is_asked_of_it(tmp_path: Path) -> None:
    directory = run_of_steps(tmp_path, 3)
    write_exit_record(directory.path, ExitCode.OK, "complete")
    position = after(3, accuracies=(0.1, 0.5, 0.6))
    with pytest.raises(RunDirectoryTaken, match=r"complete; raise eval\.stop_at"):
        reopen_directory(configured(tmp_path, "eval.stop_at=0.5"), position)
    reopen_directory(configured(tmp_path, "eval.stop_at=0.6"), position)
