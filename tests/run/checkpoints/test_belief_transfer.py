"""`selection.beliefs_from`: from another run's checkpoint to the selector of a new run."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_rl.config.cli import compose
from megatron_rl.config.schema import Configuration
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.selection.belief_selector import BeliefSelector
from megatron_rl.prompts.selection.factory import open_selector
from megatron_rl.records.progress import Progress
from megatron_rl.run.checkpoints.belief_transfer import BeliefsUnavailable, read_transferred_beliefs
from megatron_rl.run.checkpoints.resume import ResumePoint
from megatron_rl.run.checkpoints.state_file import read_state
from megatron_rl.run.checkpoints.store import CheckpointStore
from megatron_rl.run.prompts import build_prompts
from megatron_rl.run.rank import Rank
from tests.support.answers import play_steps
from tests.support.checkpoints import make_state, save_checkpoint

NOTHING: Any = None
JOB: Any = SimpleNamespace(rank=0, world_size=1, control_group=None)


def configured(*overrides: str, data: tuple[str, ...] = ("data.num_train=200",)) -> Configuration:
    return compose(["experiment=smoke", "selection=belief", *data, *overrides])


def opened(c: Configuration) -> BeliefSelector:
    selector = open_selector(build_prompts(c, read_transferred_beliefs(c)), c.rollout, c.selection, seed=c.seed)
    assert isinstance(selector, BeliefSelector)
    return selector


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    """Two checkpoints of a run on 200 prompts, in which every answer was right."""
    shelf, selector = (
        CheckpointStore(tmp_path_factory.mktemp("run") / "checkpoints"),
        opened(configured()),
    )
    for step in (1, 2):
        play_steps(selector, [step], lambda prompt, sample: 1.0)
        save_checkpoint(shelf, step, {"selection.name": "belief"}, selection=selector.state())
    return shelf


def test_a_run_begins_with_the_beliefs_of_another_one_s_newest_checkpoint(
    shelf: CheckpointStore,
) -> None:
    for given, step in ((shelf.folder.parent, 2), (shelf.folder, 2), (shelf.path(1), 1)):
        selector = opened(configured(f"selection.beliefs_from={given}", "data.num_train=300"))
        saved = read_state(shelf.path(step)).position.selection.beliefs
        assert saved is not None
        assert len(selector.beliefs) == sum(
            saved.last_group_steps[i : i + 4] != b"\xff" * 4 for i in range(0, len(saved.last_group_steps), 4)
        )
        assert selector.source.cursor.position == 0 and selector.beliefs.oldest(1) == 1
    known = len(selector.beliefs)
    assert selector.source.told()[2].startswith(
        f"beliefs: of {known} of 300 training prompts, and of 0 others; fewer"
    )


def test_a_damaged_checkpoint_is_passed_over_with_a_word_or_refused(
    shelf: CheckpointStore, tmp_path: Path
) -> None:
    other, selection = (
        CheckpointStore(tmp_path / "checkpoints"),
        read_state(shelf.path(2)).position.selection,
    )
    for step in (1, 2):
        save_checkpoint(other, step, selection=selection)
    file = other.path(2) / "state.json"
    file.write_bytes(file.read_bytes().replace(b'"step": 2', b'"step": 3'))
    c = configured(f"selection.beliefs_from={tmp_path}")
    beliefs = read_transferred_beliefs(c)
    assert beliefs is not None and "(iter_0000001)" in beliefs.told
    said = io.StringIO()
    Rank(c, Progress(1, enabled=True, stream=said), NOTHING, NOTHING).tell(
        ResumePoint(beliefs=beliefs)
    )
    assert "iter_0000002: state.json is not what was saved" in said.getvalue()
    with pytest.raises(
        BeliefsUnavailable,
        match=r"selection\.beliefs=.*no whole checkpoint.*sha256 differs.*Give the directory",
    ):
        read_transferred_beliefs(configured(f"selection.beliefs_from={other.path(2)}"))


def test_no_checkpoint_and_a_run_without_beliefs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BeliefsUnavailable,
        match=r"selection\.beliefs=.*no whole checkpoint.*manifest\.json cannot be read",
    ):
        read_transferred_beliefs(configured(f"selection.beliefs_from={tmp_path}"))
    save_checkpoint(CheckpointStore(tmp_path / "checkpoints"), 5, {"selection.name": "oversample"})
    with pytest.raises(
        BeliefsUnavailable,
        match=r"iter_0000005 had selection\.name=oversample and believed nothing.*Give one",
    ):
        read_transferred_beliefs(configured(f"selection.beliefs_from={tmp_path}"))


def test_beliefs_of_another_data_set_are_refused(shelf: CheckpointStore, tmp_path: Path) -> None:
    rows = (f'{{"id": "mine-{i}", "prompt": "{i}+1=", "answer": {i + 1}}}' for i in range(10, 40))
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    of_file = (
        "data=jsonl",
        f"data.train_path={tmp_path}/train.jsonl",
        "data.num_eval=6",
        "rollout.prompts_per_step=8",
    )
    with pytest.raises(
        PromptDataError, match=r"another data set: it has beliefs of \d+ prompts.*the 24 training"
    ):
        opened(configured(f"selection.beliefs_from={shelf.folder.parent}", data=of_file))


def test_a_run_that_goes_on_has_its_own_and_needs_no_other(
    shelf: CheckpointStore, tmp_path: Path
) -> None:
    gone = configured(f"selection.beliefs_from={tmp_path}/gone", "run.resume=auto", "run.name=a")
    assert read_transferred_beliefs(gone, read_state(shelf.path(1))) is None
    with pytest.raises(BeliefsUnavailable):
        read_transferred_beliefs(gone, make_state(3))  # it was of a run without any


def test_nothing_is_made_for_a_run_whose_beliefs_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_rl.run.rank.require_disk_space", lambda *_: None)
    c = configured(f"selection.beliefs_from={tmp_path}", f"run.root={tmp_path}/runs", "run.name=a")
    monkeypatch.setattr("megatron_rl.run.rank.broadcast_bytes", lambda data, group: data)
    rank = Rank(c, Progress(1, enabled=False), NOTHING, NOTHING)
    with pytest.raises(BeliefsUnavailable):
        rank._open_directory(JOB, NOTHING, ResumePoint())
    assert not (tmp_path / "runs").exists()


def test_what_is_set_aside_is_in_the_new_run_s_checkpoints(
    shelf: CheckpointStore, tmp_path: Path
) -> None:
    selector = opened(configured(f"selection.beliefs_from={shelf.folder.parent}", "data.num_train=100"))
    aside = selector.beliefs.aside
    assert aside > 0
    save_checkpoint(CheckpointStore(tmp_path / "checkpoints"), 1, selection=selector.state())
    again = opened(configured(f"selection.beliefs_from={tmp_path}", "data.num_train=200"))
    assert again.beliefs.aside == 0 and len(again.beliefs) == len(selector.beliefs)
    resumed = opened(configured("data.num_train=100"))
    resumed.restore(
        msgspec.json.decode(msgspec.json.encode(selector.state()), type=type(selector.state()))
    )
    assert resumed.beliefs.aside == aside
