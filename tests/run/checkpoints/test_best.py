"""The checkpoint of the best evaluation is kept, named, and found again by a resumed run."""

import io
import json
import math
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.evaluations import best_metric, is_best_metric
from megatron_rl.config.schema import EvalSetSettings, EvalSettings
from megatron_rl.contracts.commands import Checkpoint, Command
from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.contracts.run_state import BestState, LoopState, RunState
from megatron_rl.run.checkpoints.best import BestCheckpoint
from megatron_rl.run.checkpoints.export import ExportRequest
from megatron_rl.run.checkpoints.manager import CheckpointManager, SavePoint
from megatron_rl.run.checkpoints.resume import checkpoints_at
from megatron_rl.run.checkpoints.saving import SaveResult
from megatron_rl.run.checkpoints.state_file import encode_state, read_state
from megatron_rl.run.checkpoints.store import CheckpointStore, step_of
from tests.support.checkpoint_managers import make_manager
from tests.support.checkpoints import make_state, save_checkpoint
from tests.support.leaders import ScriptedParts, lead

METRIC = "eval/accuracy"


class SavingRanks:
    """Saves small checkpoints as the ranks do. fail_at: steps whose save fails."""

    def __init__(self, run: Path, *, keep: int = 1, fail_at: tuple[int, ...] = ()) -> None:
        self.store = CheckpointStore(run / "checkpoints")
        self._keep = keep
        self._fail_at = fail_at
        self._pending: SaveResult | None = None

    def run(self, command: Command) -> SaveResult | None:
        if not isinstance(command, Checkpoint):
            return self._pending
        problem = "disk full" if command.step in self._fail_at else ""
        if not problem:
            self._save(command)
        result = SaveResult(command.step, problem)
        self._pending = result
        return None if command.background else result

    def _save(self, command: Checkpoint) -> None:
        state = msgspec.json.decode(command.state, type=RunState)
        path = save_checkpoint(self.store, command.step)
        (path / "state.json").write_bytes(encode_state(state))
        if command.best is not None:
            self.store.set_best(command.best)
        best_step = None if command.best is None else command.best.step
        self.store.prune(self._keep, best_step=best_step)

    @property
    def steps(self) -> list[int]:
        return [step_of(path) or 0 for path in self.store.checkpoints()]

    @property
    def best_step(self) -> int | None:
        """The step that the link and best.json name."""
        record = self.store.folder.parent / "best.json"
        if not record.exists():
            assert not os.path.lexists(self.store.best_link)
            return None
        content = json.loads(record.read_bytes())
        assert self.store.best_link.resolve().name == Path(content["checkpoint"]).name
        assert read_state(self.store.best_link).step == content["step"]
        return int(content["step"])


def manager_of(ranks: SavingRanks, state: BestState | None = None, **run: Any) -> CheckpointManager:
    manager = make_manager(ranks, **({"checkpoint_every": 2} | run))  # type: ignore[arg-type]
    manager.best = BestCheckpoint(METRIC, ranks.store, state)
    return manager


def train(
    tmp_path: Path, ranks: SavingRanks, accuracies: list[float], **options: Any
) -> tuple[CheckpointManager, str]:
    """Train one step for each accuracy after step 0's. Returns the manager and the screen."""
    screen = io.StringIO()
    manager = manager_of(ranks, **options)
    parts = ScriptedParts(accuracies=accuracies)
    steps = len(accuracies) - 1
    evals = {"every": 1}
    lead(parts, tmp_path, steps=steps, evals=evals, checkpoints=manager, stream=screen)
    return manager, screen.getvalue()


def test_the_best_checkpoint_survives_newer_ones(tmp_path: Path) -> None:
    """Step 0 is the best of all, but it has no checkpoint. Step 3 saves one that is not due."""
    ranks = SavingRanks(tmp_path)
    _, screen = train(tmp_path, ranks, [0.9, 0.1, 0.3, 0.8, 0.2, 0.5, 0.4])
    assert ranks.steps == [6, 3]
    assert ranks.best_step == 3
    link = tmp_path / "checkpoints" / "best"
    assert f"best checkpoint: step 3, eval/accuracy=0.8, at {link}" in screen


def test_of_equal_evaluations_the_earlier_one_stays(tmp_path: Path) -> None:
    ranks = SavingRanks(tmp_path)
    train(tmp_path, ranks, [0.0, 0.5, 0.5, 0.5])
    assert ranks.best_step == 1
    assert ranks.steps == [3, 1]


@pytest.mark.parametrize("background_saves", [False, True])
def test_a_failed_save_leaves_the_previous_best(tmp_path: Path, background_saves: bool) -> None:
    """Step 2 is better than step 1, and cannot be saved."""
    ranks = SavingRanks(tmp_path, fail_at=(2,))
    with pytest.raises(Failure, match="step 2 cannot be saved"):
        train(tmp_path, ranks, [0.0, 0.5, 0.9, 0.1], background_saves=background_saves)
    assert ranks.best_step == 1
    assert ranks.steps == ([3, 1] if background_saves else [1])


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    accuracies=st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75]), min_size=2, max_size=7),
    keep=st.integers(1, 3),
    every=st.integers(1, 4),
)
def test_the_first_of_the_highest_accuracies_is_kept(
    tmp_path_factory: pytest.TempPathFactory, accuracies: list[float], keep: int, every: int
) -> None:
    run = tmp_path_factory.mktemp("run")
    ranks = SavingRanks(run, keep=keep)
    train(run, ranks, accuracies, checkpoint_every=every)
    highest = max(accuracies[1:])
    assert ranks.best_step == accuracies.index(highest, 1)
    assert ranks.best_step in ranks.steps
    assert len(ranks.steps) <= keep + 1
    assert ranks.steps[0] == len(accuracies) - 1


def resume_state(ranks: SavingRanks) -> tuple[LoopState, BestState | None]:
    state = read_state(ranks.store.checkpoints()[0])
    return state.position, state.best


def test_a_resumed_run_knows_its_best(tmp_path: Path) -> None:
    ranks = SavingRanks(tmp_path)
    train(tmp_path, ranks, [0.0, 0.8, 0.3])
    position, best = resume_state(ranks)
    assert best == BestState(metric=METRIC, value=0.8, step=1)
    manager = manager_of(ranks, best)
    parts = ScriptedParts(accuracies=[0.7, 0.6])
    evals = {"every": 1}
    lead(parts, tmp_path, steps=4, evals=evals, checkpoints=manager, resume_state=position)
    assert ranks.best_step == 1
    assert ranks.steps == [4, 1]


@pytest.mark.parametrize("change", ["gone", "metric"])
def test_a_best_checkpoint_that_is_gone_or_of_another_metric_is_forgotten(
    tmp_path: Path, change: str
) -> None:
    ranks = SavingRanks(tmp_path, keep=2)
    train(tmp_path, ranks, [0.0, 0.8, 0.3])
    _, best = resume_state(ranks)
    assert best is not None
    if change == "gone":
        best = msgspec.structs.replace(best, step=7)
    else:
        best = msgspec.structs.replace(best, metric="eval/reward")
    follower = BestCheckpoint(METRIC, ranks.store, best)
    assert follower.state(3) is None
    assert ranks.best_step is None
    assert follower.summary().startswith("warning: run.keep_best")


def test_an_evaluation_that_is_made_up_for_marks_the_checkpoint_that_exists(
    tmp_path: Path,
) -> None:
    ranks = SavingRanks(tmp_path)
    manager = manager_of(ranks)
    manager.save(SavePoint(make_state(4).position))
    manager.observe_evaluation(4, {METRIC: 0.6})
    assert ranks.best_step == 4
    assert not manager.is_due(4, last=True)
    manager.save(SavePoint(make_state(6).position))
    assert ranks.steps == [6, 4]


@pytest.mark.parametrize("values", [{}, {METRIC: math.nan}, {"eval/hard/accuracy": 1.0}])
def test_values_that_are_no_better_do_not_replace_the_best(
    tmp_path: Path, values: dict[str, float]
) -> None:
    ranks = SavingRanks(tmp_path)
    manager = manager_of(ranks)
    manager.observe_evaluation(2, {METRIC: 0.6})
    manager.save(SavePoint(make_state(2).position))
    manager.observe_evaluation(4, values)
    manager.save(SavePoint(make_state(4).position))
    assert ranks.best_step == 2


def test_the_link_names_a_checkpoint_to_export_or_resume(tmp_path: Path) -> None:
    ranks = SavingRanks(tmp_path)
    train(tmp_path, ranks, [0.0, 0.8, 0.3])
    request = ExportRequest(source=tmp_path / "checkpoints" / "best", out=tmp_path / "out")
    (checkpoint,) = checkpoints_at(request.source)
    assert step_of(checkpoint) == 1
    assert [step_of(path) for path in checkpoints_at(tmp_path)] == [2, 1]


@pytest.mark.parametrize(
    ("keep_best", "metric", "is_valid"),
    [
        ("held_out", "eval/accuracy", True),
        ("hard", "eval/hard/accuracy", True),
        ("eval/hard/pass@4", "eval/hard/pass@4", True),
        ("eval/hard/pass@8", "eval/hard/pass@8", False),
        ("eval/reward", "eval/reward", True),
        ("eval/rejected", "eval/rejected", False),
        ("other", "eval/other/accuracy", False),
        ("", "eval//accuracy", False),
    ],
)
def test_names_and_metrics_of_the_best(keep_best: str, metric: str, is_valid: bool) -> None:
    evaluation = EvalSettings(sets={"hard": EvalSetSettings(path="x", samples_per_prompt=4)})
    assert best_metric(keep_best) == metric
    assert is_best_metric(metric, evaluation) == is_valid


def test_an_evaluation_that_is_nan_is_never_the_best(tmp_path: Path) -> None:
    best = BestCheckpoint(METRIC, CheckpointStore(tmp_path / "checkpoints"))
    best.observe(1, {METRIC: math.nan}, is_saved=False)
    assert best.state(1) is None


def test_without_symbolic_links_a_file_names_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, target: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    store = CheckpointStore(tmp_path / "checkpoints")
    store.path(4).mkdir(parents=True)
    store.set_best(BestState(metric=METRIC, value=0.5, step=4))
    record = json.loads((tmp_path / "best.json").read_text())
    assert record["checkpoint"] == f"checkpoints/{store.path(4).name}"
    assert not store.best_link.exists()
