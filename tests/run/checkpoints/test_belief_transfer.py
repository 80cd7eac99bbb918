"""`selection.beliefs_from`: from the checkpoint of another run to the selector of a new run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.belief_state import NEVER_SAMPLED
from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.selection.belief_selector import BeliefSelector
from megatron_rl.prompts.selection.factory import open_selector
from megatron_rl.run.checkpoints.belief_transfer import read_transferred_beliefs
from megatron_rl.run.checkpoints.state_file import read_state
from megatron_rl.run.checkpoints.store import CheckpointStore
from megatron_rl.run.prompts import build_prompts
from tests.support.answers import play_steps
from tests.support.checkpoints import make_state, save_checkpoint
from tests.support.configurations import configuration_of
from tests.support.openings import open_up_to_engines


def make_configuration(
    *overrides: str, data: tuple[str, ...] = ("data.num_train=200",)
) -> Configuration:
    return configuration_of(["experiment=smoke", "selection=belief", *data, *overrides])


def open_belief_selector(c: Configuration) -> BeliefSelector:
    prompts = build_prompts(c)
    beliefs = read_transferred_beliefs(c)
    if beliefs is not None:
        beliefs.apply_to(prompts)
    selector = open_selector(prompts, c.rollout, c.selection, seed=c.seed)
    assert isinstance(selector, BeliefSelector)
    return selector


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    """Two checkpoints of a run on 200 prompts, in which every answer was correct."""
    store = CheckpointStore(tmp_path_factory.mktemp("run") / "checkpoints")
    selector = open_belief_selector(make_configuration())
    for step in (1, 2):
        play_steps(selector, [step], lambda prompt, sample: 1.0)
        save_checkpoint(store, step, {"selection.name": "belief"}, selection=selector.state())
    return store


@pytest.mark.slow
def test_a_run_starts_with_the_beliefs_of_the_newest_checkpoint(store: CheckpointStore) -> None:
    for path, step in ((store.folder.parent, 2), (store.folder, 2), (store.path(1), 1)):
        overrides = (f"selection.beliefs_from={path}", "data.num_train=300")
        selector = open_belief_selector(make_configuration(*overrides))
        state = read_state(store.path(step)).position.selection.beliefs
        assert state is not None
        last_group_steps = np.frombuffer(state.last_group_steps, np.int32)
        assert len(selector.beliefs) == np.count_nonzero(last_group_steps != NEVER_SAMPLED)
        assert selector.source.cursor.position == 0
        assert selector.beliefs.max_declines() == 0


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    store: CheckpointStore, tmp_path: Path
) -> None:
    other_store = CheckpointStore(tmp_path / "checkpoints")
    selection = read_state(store.path(2)).position.selection
    for step in (1, 2):
        save_checkpoint(other_store, step, selection=selection)
    file = other_store.path(2) / "state.json"
    file.write_bytes(file.read_bytes().replace(b'"step": 2', b'"step": 3'))
    c = make_configuration(
        f"selection.beliefs_from={tmp_path}", f"run.root={tmp_path}/runs", "run.name=a"
    )
    with open_up_to_engines(c) as lines:
        (warning,) = (line for line in lines if "skipping a damaged" in line)
    assert "warning: skipping a damaged checkpoint" in warning
    assert "iter_0000002: state.json has changed" in warning
    with pytest.raises(Failure, match=r"selection\.beliefs_from=.*complete checkpoint.*sha256"):
        read_transferred_beliefs(
            make_configuration(f"selection.beliefs_from={other_store.path(2)}")
        )


def test_a_directory_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        Failure,
        match=r"selection\.beliefs_from=.*complete checkpoint.*manifest\.json cannot be read",
    ):
        read_transferred_beliefs(make_configuration(f"selection.beliefs_from={tmp_path}"))


def test_a_run_without_beliefs_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    save_checkpoint(store, 5, {"selection.name": "oversample"})
    with pytest.raises(Failure, match=r"iter_0000005 had selection\.name=oversample.*no beliefs"):
        read_transferred_beliefs(make_configuration(f"selection.beliefs_from={tmp_path}"))


@pytest.mark.slow
def test_beliefs_about_another_data_set_are_refused(store: CheckpointStore, tmp_path: Path) -> None:
    rows = [f'{{"id": "mine-{i}", "prompt": "{i}+1=", "answer": {i + 1}}}' for i in range(10, 40)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    data = (
        "data=jsonl",
        f"data.train_path={tmp_path}/train.jsonl",
        "data.num_eval=6",
        "rollout.prompts_per_step=8",
    )
    beliefs = f"selection.beliefs_from={store.folder.parent}"
    c = make_configuration(beliefs, f"run.root={tmp_path}/runs", data=data)
    with pytest.raises(PromptDataError, match="another data set"), open_up_to_engines(c):
        pass


def test_a_run_that_resumes_keeps_its_own_beliefs(store: CheckpointStore, tmp_path: Path) -> None:
    c = make_configuration(
        f"selection.beliefs_from={tmp_path}/missing", "run.resume=auto", "run.name=a"
    )
    assert read_transferred_beliefs(c, read_state(store.path(1))) is None
    # This state has no beliefs, so they are read from the other run
    with pytest.raises(Failure):
        read_transferred_beliefs(c, make_state(3))


@pytest.mark.parametrize("mode", ["eval", "profile", "train_only"])
def test_a_mode_that_selects_no_prompts_reads_no_beliefs(tmp_path: Path, mode: Any) -> None:
    """An experiment's file may have selection=belief."""
    c = make_configuration(f"selection.beliefs_from={tmp_path}")
    assert read_transferred_beliefs(replace(c, mode=mode)) is None


def test_no_directory_is_made_when_beliefs_cannot_be_read(tmp_path: Path) -> None:
    c = make_configuration(
        f"selection.beliefs_from={tmp_path}", f"run.root={tmp_path}/runs", "run.name=a"
    )
    with pytest.raises(Failure, match=r"selection\.beliefs_from"), open_up_to_engines(c):
        pass
    assert not (tmp_path / "runs").exists()


def test_beliefs_about_missing_prompts_are_in_the_checkpoints_of_the_new_run(
    store: CheckpointStore, tmp_path: Path
) -> None:
    source = f"selection.beliefs_from={store.folder.parent}"
    selector = open_belief_selector(make_configuration(source, "data.num_train=100"))
    aside = selector.beliefs.num_outside_pool
    assert aside > 0
    new_store = CheckpointStore(tmp_path / "checkpoints")
    save_checkpoint(new_store, 1, selection=selector.state())
    next_selector = open_belief_selector(
        make_configuration(f"selection.beliefs_from={tmp_path}", "data.num_train=200")
    )
    assert next_selector.beliefs.num_outside_pool == 0
    assert len(next_selector.beliefs) == len(selector.beliefs)
    state = msgspec.json.decode(msgspec.json.encode(selector.state()), type=type(selector.state()))
    resumed_selector = open_belief_selector(make_configuration("data.num_train=100"))
    resumed_selector.restore(state)
    assert resumed_selector.beliefs.num_outside_pool == aside
