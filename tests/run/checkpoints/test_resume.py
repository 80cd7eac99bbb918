"""Where a run begins: the newest whole checkpoint, and what is said of the others."""

import io
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config.cli import compose
from megatron_rl.config.schema import Configuration
from megatron_rl.records.progress import Progress
from megatron_rl.records.run_directory import RunDirectory, RunDirectoryTaken
from megatron_rl.records.run_lock import claim_run, mark_run_alive
from megatron_rl.run.checkpoints.resume import (
    CheckpointOfOtherRun,
    NoCompleteCheckpoint,
    ResumePoint,
    find_resume_point,
    open_run_directory,
    flat_configuration,
)
from megatron_rl.run.checkpoints.resumed_directory import claim
from megatron_rl.run.checkpoints.store import CheckpointStore
from megatron_rl.run.rank import Rank
from tests.support.checkpoints import make_state, save_checkpoint

NOTHING: Any = None
JOB: Any = SimpleNamespace(rank=0, world_size=1, control_group=None)


def configured(root: Path, *overrides: str) -> Configuration:
    return compose(["experiment=smoke", f"run.root={root}", "run.name=job", *overrides])


@pytest.fixture
def shelf(tmp_path: Path) -> CheckpointStore:
    """Three checkpoints of a run that was killed."""
    directory = open_run_directory(configured(tmp_path), ResumePoint())
    shelf = CheckpointStore(directory.checkpoints)
    for step in (5, 10, 15):
        save_checkpoint(shelf, step, flat_configuration(configured(tmp_path, "run.resume=auto")))
    return shelf


def test_a_new_run_begins_at_its_start_checkpoint(tmp_path: Path) -> None:
    for overrides in ((), ("run.resume=auto",)):
        c = configured(tmp_path, *overrides)
        assert find_resume_point(c, JOB) == ResumePoint()
    assert open_run_directory(c, ResumePoint()).metrics_file.parent == tmp_path / "job"


def test_the_newest_whole_checkpoint_is_taken_and_damaged_ones_are_named(
    tmp_path: Path, shelf: CheckpointStore
) -> None:
    flipped = bytearray((shelf.path(15) / "tensors").read_bytes())
    flipped[0] ^= 1
    (shelf.path(15) / "tensors").write_bytes(flipped)
    (shelf.path(10) / "tensors").unlink()
    c = configured(tmp_path, "run.resume=auto")
    start = find_resume_point(c, JOB)
    assert start.checkpoint == shelf.path(5) and start.state is not None and start.state.step == 5
    newest, middle = start.damaged
    assert (
        "iter_0000015: tensors is not what was saved" in newest
        and "iter_0000010: tensors is missing" in middle
    )
    open_run_directory(c, start)
    assert [path.name for path in shelf.saved()] == ["iter_0000005"]
    assert (shelf.folder / "iter_0000015.damaged-1/tensors").exists()


def test_what_the_dying_run_before_still_prunes_is_not_taken(
    tmp_path: Path, shelf: CheckpointStore
) -> None:
    alive, c = mark_run_alive(shelf.folder.parent), configured(tmp_path, "run.resume=auto")

    def die() -> None:
        save_checkpoint(shelf, 20, flat_configuration(c))
        shelf.prune(1)
        alive.close()

    dying = threading.Timer(0.5, die)
    dying.start()
    rank = Rank(c, Progress(1, enabled=False), NOTHING, NOTHING)
    assert rank.find_resume_point(JOB).checkpoint == shelf.path(20)
    dying.join()
    assert claim_run(shelf.folder.parent) is None, "the run has it now"
    rank.close()


def test_going_on_without_checkpoints_is_said(tmp_path: Path) -> None:
    for overrides, warned in (((), True), (("run.checkpoint_every=2",), False)):
        said = io.StringIO()
        c = configured(tmp_path, "run.resume=auto", *overrides)
        Rank(c, Progress(1, enabled=True, stream=said), NOTHING, NOTHING).tell(ResumePoint())
        assert ("run.checkpoint_every=0 saves none" in said.getvalue()) == warned


def test_a_run_without_any_whole_checkpoint_is_not_started_anew_in_silence(
    tmp_path: Path, shelf: CheckpointStore
) -> None:
    for path in shelf.saved():
        (path / "manifest.json").unlink()
    with pytest.raises(
        NoCompleteCheckpoint, match=r"iter_0000015: manifest\.json cannot be read.*iter_0000005"
    ):
        find_resume_point(configured(tmp_path, "run.resume=auto"), JOB)


def test_another_run_begins_from_a_run_or_one_of_its_checkpoints(
    tmp_path: Path, shelf: CheckpointStore
) -> None:
    for given, step in ((tmp_path / "job", 15), (shelf.folder, 15), (shelf.path(10), 10)):
        c = configured(tmp_path, f"run.resume={given}", "run.name=other")
        assert find_resume_point(c, JOB).checkpoint == shelf.path(step)
    assert open_run_directory(c, find_resume_point(c, JOB)).path == tmp_path / "other"
    assert len(shelf.saved()) == 3
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoCompleteCheckpoint, match="empty"):
        find_resume_point(configured(tmp_path, f"run.resume={tmp_path}/empty", "run.name=third"), JOB)


def test_what_may_change_is_told_and_what_may_not_is_refused(tmp_path: Path) -> None:
    old = flat_configuration(configured(tmp_path, "optimizer.lr=0.1", "parallel.ep=1"))
    start = ResumePoint(tmp_path, make_state(5, old))
    c = configured(tmp_path, "optimizer.lr=0.2", "run.resume=auto", "run.checkpoint_every=3")
    assert start.changed(c) == ["optimizer.lr: 0.1 -> 0.2"]
    with pytest.raises(CheckpointOfOtherRun, match=r"data\.seed: 0 -> 7.*Give the old ones"):
        start.changed(configured(tmp_path, "optimizer.lr=0.1", "data.seed=7"))


def test_a_path_may_be_written_in_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "rollouts")
    train_only = ("mode=train_only", "run.resume=auto")
    old = flat_configuration(configured(tmp_path, *train_only, f"rollout.recording={tmp_path}/rollouts"))
    start = ResumePoint(tmp_path, make_state(5, old))
    for same in ("rollouts", "./linked", f"{tmp_path}/linked/../rollouts"):
        assert start.changed(configured(tmp_path, *train_only, f"rollout.recording={same}")) == []
    with pytest.raises(CheckpointOfOtherRun, match=r"rollout\.recorded: '.*rollouts' -> '.'"):
        start.changed(configured(tmp_path, *train_only, "rollout.recording=."))


def test_a_directory_of_something_else_is_not_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    with pytest.raises(RunDirectoryTaken, match="not the directory of a run"):
        claim_directory(configured(tmp_path, "run.resume=auto"))
    assert RunDirectory(tmp_path / "job").path.exists()
