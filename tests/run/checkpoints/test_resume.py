"""Finding the newest complete checkpoint, and comparing its settings with those of the run."""

import io
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config.cli import compose
from megatron_rl.config.schema import Configuration
from megatron_rl.records.progress import Progress
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.records.run_lock import claim_run, mark_run_alive
from megatron_rl.run import open_run
from megatron_rl.run.checkpoints.resume import (
    CheckpointOfOtherRun,
    NoCompleteCheckpoint,
    ResumePoint,
    find_resume_point,
    flat_configuration,
    open_run_directory,
)
from megatron_rl.run.checkpoints.store import CheckpointStore
from megatron_rl.run.setup import RunSetup
from megatron_rl.run.supervision.open_parts import OpenParts
from tests.support.checkpoints import flip_bit, make_state, save_checkpoint

JOB: Any = SimpleNamespace(rank=0, world_size=1, control_group=None)
NO_SHAPE: Any = None


def make_configuration(root: Path, *overrides: str) -> Configuration:
    return compose(["experiment=smoke", f"run.root={root}", "run.name=job", *overrides])


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Three checkpoints of a run that was killed."""
    directory = open_run_directory(make_configuration(tmp_path), ResumePoint())
    store = CheckpointStore(directory.checkpoints)
    settings = flat_configuration(make_configuration(tmp_path, "run.resume=auto"))
    for step in (5, 10, 15):
        save_checkpoint(store, step, settings)
    return store


@pytest.mark.parametrize("overrides", [(), ("run.resume=auto",)])
def test_a_new_run_has_no_resume_point(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    c = make_configuration(tmp_path, *overrides)
    assert find_resume_point(c, JOB) == ResumePoint()
    assert open_run_directory(c, ResumePoint()).path == tmp_path / "job"


def test_the_newest_complete_checkpoint_is_found_and_damaged_ones_are_reported(
    tmp_path: Path, store: CheckpointStore
) -> None:
    flip_bit(store.path(15) / "tensors")
    (store.path(10) / "tensors").unlink()
    c = make_configuration(tmp_path, "run.resume=auto")
    resume_point = find_resume_point(c, JOB)
    assert resume_point.checkpoint == store.path(5)
    assert resume_point.state is not None
    assert resume_point.state.step == 5
    newest, middle = resume_point.damaged_checkpoints
    assert "iter_0000015: tensors has changed" in newest
    assert "iter_0000010: tensors is missing" in middle
    open_run_directory(c, resume_point)
    assert [path.name for path in store.checkpoints()] == ["iter_0000005"]
    assert (store.folder / "iter_0000015.damaged-1/tensors").exists()


def test_the_resume_point_is_found_after_the_previous_processes_ended(
    tmp_path: Path, store: CheckpointStore
) -> None:
    """A dying process can still save a checkpoint and remove others."""
    lock = mark_run_alive(store.folder.parent)
    c = make_configuration(tmp_path, "run.resume=auto")

    def die() -> None:
        save_checkpoint(store, 20, flat_configuration(c))
        store.prune(1)
        lock.close()

    death = threading.Timer(0.5, die)
    death.start()
    parts = OpenParts()
    resume_point = open_run._find_resume_point(c, JOB, Progress(1, enabled=False), parts)
    assert resume_point.checkpoint == store.path(20)
    death.join()
    # This process holds the claim now
    assert claim_run(store.folder.parent) is None
    parts.close()


@pytest.mark.parametrize(
    ("overrides", "is_warned"), [((), True), (("run.checkpoint_every=2",), False)]
)
def test_resume_auto_without_checkpoints_is_warned_about(
    tmp_path: Path, overrides: tuple[str, ...], is_warned: bool
) -> None:
    stream = io.StringIO()
    c = make_configuration(tmp_path, "run.resume=auto", *overrides)
    setup = RunSetup(
        configuration=c,
        shape=NO_SHAPE,
        job=JOB,
        resume_point=ResumePoint(),
        directory=RunDirectory(tmp_path / "job"),
        beliefs=None,
        progress=Progress(1, enabled=True, stream=stream),
    )
    open_run._log_resume_point(setup)
    assert ("run.checkpoint_every=0" in stream.getvalue()) == is_warned


def test_a_run_without_any_complete_checkpoint_does_not_start_anew(
    tmp_path: Path, store: CheckpointStore
) -> None:
    for path in store.checkpoints():
        (path / "manifest.json").unlink()
    with pytest.raises(
        NoCompleteCheckpoint, match=r"iter_0000015: manifest\.json cannot be read.*iter_0000005"
    ):
        find_resume_point(make_configuration(tmp_path, "run.resume=auto"), JOB)


def test_another_run_starts_from_a_run_or_from_one_of_its_checkpoints(
    tmp_path: Path, store: CheckpointStore
) -> None:
    for path, step in ((tmp_path / "job", 15), (store.folder, 15), (store.path(10), 10)):
        c = make_configuration(tmp_path, f"run.resume={path}", "run.name=other")
        assert find_resume_point(c, JOB).checkpoint == store.path(step)
    directory = open_run_directory(c, find_resume_point(c, JOB))
    assert directory.path == tmp_path / "other"
    assert len(store.checkpoints()) == 3


def test_a_directory_without_checkpoints_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    c = make_configuration(tmp_path, f"run.resume={tmp_path}/empty", "run.name=third")
    with pytest.raises(NoCompleteCheckpoint, match="empty"):
        find_resume_point(c, JOB)


def test_changed_settings_are_listed_or_refused(tmp_path: Path) -> None:
    settings = flat_configuration(make_configuration(tmp_path, "optimizer.lr=0.1", "parallel.ep=1"))
    resume_point = ResumePoint(tmp_path, make_state(5, settings))
    c = make_configuration(
        tmp_path, "optimizer.lr=0.2", "run.resume=auto", "run.checkpoint_every=3"
    )
    assert resume_point.changed_settings(c) == ["optimizer.lr: 0.1 -> 0.2"]
    c = make_configuration(tmp_path, "optimizer.lr=0.1", "data.seed=7")
    with pytest.raises(CheckpointOfOtherRun, match=r"data\.seed: 0 -> 7"):
        resume_point.changed_settings(c)


def test_two_spellings_of_a_path_are_the_same_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "rollouts")
    mode = ("mode=train_only", "run.resume=auto")
    c = make_configuration(tmp_path, *mode, f"rollout.recording={tmp_path}/rollouts")
    resume_point = ResumePoint(tmp_path, make_state(5, flat_configuration(c)))
    for path in ("rollouts", "./link", f"{tmp_path}/link/../rollouts"):
        c = make_configuration(tmp_path, *mode, f"rollout.recording={path}")
        assert resume_point.changed_settings(c) == []
    with pytest.raises(CheckpointOfOtherRun, match=r"rollout\.recording: '.*rollouts' -> '.'"):
        resume_point.changed_settings(make_configuration(tmp_path, *mode, "rollout.recording=."))


@pytest.mark.parametrize(
    "override", ["model.recompute=full", "model.dtype=bfloat16", "model.spec=local"]
)
def test_settings_of_the_model_can_change(tmp_path: Path, override: str) -> None:
    settings = flat_configuration(make_configuration(tmp_path))
    resume_point = ResumePoint(tmp_path, make_state(5, settings))
    changes = resume_point.changed_settings(make_configuration(tmp_path, override))
    # engine.dtype follows model.dtype
    assert any(change.startswith(override.partition("=")[0]) for change in changes)


@pytest.mark.parametrize("mode", [["mode=eval"], ["mode=profile", "data.pass_rates=rates.jsonl"]])
def test_a_measurement_lists_changed_data_alone(tmp_path: Path, mode: list[str]) -> None:
    settings = flat_configuration(make_configuration(tmp_path))
    resume_point = ResumePoint(tmp_path, make_state(5, settings))
    overrides = ("data.num_eval=7", "optimizer.lr=0.7")
    c = make_configuration(tmp_path, *mode, f"run.resume={tmp_path}", *overrides)
    changes = resume_point.changed_settings(c)
    assert "data.num_eval: 128 -> 7" in changes
    assert all(change.startswith("data.") for change in changes)


@pytest.mark.parametrize("override", ["data.num_eval=7", "seed=7", "model.init=random"])
def test_settings_that_give_the_state_its_meaning_cannot_change(
    tmp_path: Path, override: str
) -> None:
    settings = flat_configuration(make_configuration(tmp_path))
    resume_point = ResumePoint(tmp_path, make_state(5, settings))
    with pytest.raises(CheckpointOfOtherRun, match=override.partition("=")[0]):
        resume_point.changed_settings(make_configuration(tmp_path, override))
