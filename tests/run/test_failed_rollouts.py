"""A step whose rollouts fail: what the run trained before it is saved."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from megatron_rl.contracts.commands import Checkpoint, Command
from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.contracts.group import Group
from megatron_rl.engines.fleet import NoEngineLeft
from megatron_rl.engines.token_counter import TokenComparison
from megatron_rl.rollouts.queue import CollectorFailed, HoldTimedOut
from megatron_rl.rollouts.recording.recorded_rollouts import BadRecording
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch, TooManyRejected
from megatron_rl.rollouts.steps.steps_ahead import SecondsToStop, StepSource
from megatron_rl.rollouts.wire.rejections import UserClassFailed
from megatron_rl.run.checkpoints.saving import SaveResult
from tests.support.checkpoint_managers import FakeRanks, make_manager
from tests.support.groups import group
from tests.support.leaders import ScriptedParts, lead


def fail_at(step: int, failure: type[Failure] = TooManyRejected) -> Callable[[int], None]:
    def on_sample(current_step: int) -> None:
        if current_step == step:
            raise failure("the judge is down")

    return on_sample


@pytest.mark.parametrize(
    "failure", [TooManyRejected, UserClassFailed, CollectorFailed, BadRecording]
)
def test_what_was_trained_before_failed_rollouts_is_saved(
    tmp_path: Path, failure: type[Failure]
) -> None:
    ranks = FakeRanks()
    parts = ScriptedParts(on_sample=fail_at(4, failure))
    with pytest.raises(failure):
        lead(parts, tmp_path, steps=9, checkpoints=make_manager(ranks))
    assert ranks.steps == [2, 3]
    state = ranks.states[-1].position
    assert state.selection.prompts.position == 3, "the prompts of step 4 are sampled again"
    assert state.unevaluated_metrics is None
    resumed_parts = lead(ScriptedParts(), tmp_path, steps=4, resume_state=state)
    assert "sample step-4" in resumed_parts.calls
    assert "sample step-3" not in resumed_parts.calls


def test_failed_rollouts_of_a_later_step_end_the_run_once_the_steps_before_are_trained(
    tmp_path: Path,
) -> None:
    """The rollouts of step 4 fail while step 3 trains. Step 3 is trained, synced and saved."""
    current = group(1.0, 0.0, name="g")
    rollouts = [msgspec.structs.replace(r, tokens_by_version=()) for r in current.rollouts]
    current = msgspec.structs.replace(current, rollouts=tuple(rollouts))
    ranks = FakeRanks()
    parts = ScriptedParts(on_sample=fail_at(4), groups=[current])
    manager = make_manager(ranks, checkpoint_every=5)
    with pytest.raises(TooManyRejected):
        lead(parts, tmp_path, steps=9, max_staleness=1, checkpoints=manager)
    first = parts.calls.index("sample step-3")
    assert parts.calls[first:] == [
        "sample step-3",
        "sync 2",
        "train 3",
        "sample step-4",
        "sync 3",
    ]
    assert list(parts.metrics) == [0, 1, 2, 3]
    assert ranks.steps == [3]
    state = ranks.states[0].position
    assert state.selection.prompts.position == 3, "the prompts of step 4 are sampled again"
    assert (state.weights_synced, state.steps_ahead, state.open_steps) == (True, (), ())
    resumed_parts = ScriptedParts(groups=[current])
    lead(resumed_parts, tmp_path, steps=5, max_staleness=1, resume_state=state)
    assert [call for call in resumed_parts.calls if call.startswith("sample")] == [
        "sample step-4",
        "sample step-5",
    ]


def test_what_was_trained_before_rollouts_that_are_sampled_again_in_vain_is_saved(
    tmp_path: Path,
) -> None:
    ranks = FakeRanks()
    parts = ScriptedParts(lost_rollouts=[(), (), ("r1",)], on_sample_again=fail_at(3))
    manager = make_manager(ranks, checkpoint_every=9)
    with pytest.raises(TooManyRejected):
        lead(parts, tmp_path, steps=9, checkpoints=manager)
    assert parts.calls[-2:] == ["train 3", "sample again r1"]
    assert ranks.steps == [2]
    position = ranks.states[0].position.selection.prompts.position
    assert position == 2, "the prompts of step 3 are sampled again"


def test_a_checkpoint_holds_no_later_step_that_is_sampled_again_in_vain(tmp_path: Path) -> None:
    """The rollouts of step 4 are lost before the checkpoint of step 3."""

    class LossyParts(ScriptedParts):
        def replace_lost(self, batch: RolloutBatch) -> RolloutBatch:
            return dataclasses.replace(batch, num_repeated=batch.num_repeated + 1)

        def require(self, step: int, batch: RolloutBatch) -> None:
            if step == 4:
                raise TooManyRejected("batch step-4")

    current = group(1.0, 0.0, name="g")
    rollouts = [msgspec.structs.replace(r, tokens_by_version=()) for r in current.rollouts]
    current = msgspec.structs.replace(current, rollouts=tuple(rollouts))
    ranks = FakeRanks()
    manager = make_manager(ranks, checkpoint_every=3)
    parts = LossyParts(groups=[current])
    with pytest.raises(TooManyRejected, match="step-4"):
        lead(parts, tmp_path, steps=9, max_staleness=1, checkpoints=manager)
    assert ranks.steps == [3]
    state = ranks.states[0].position
    assert state.selection.prompts.position == 3, "the prompts of step 4 are sampled again"
    assert state.steps_ahead == ()


@dataclass
class FailingSync:
    """Fails before or after the sync of one step."""

    failure: Failure = field(default_factory=lambda: CollectorFailed("too many failures"))
    step: int = 3
    fails_before: bool = True
    num_syncs: int = 0
    is_quiet: bool = True
    num_uncounted: int = 0

    def before_sync(self, source: StepSource) -> int:
        self.num_syncs += 1
        if self.fails_before and self.num_syncs == self.step:
            raise self.failure
        return source.count_tokens()

    def after_sync(self, source: StepSource) -> None:
        if self.num_syncs == self.step:
            raise self.failure

    def before_save(
        self, source: StepSource, seconds_to_stop: SecondsToStop
    ) -> Mapping[int, tuple[Group, ...]]:
        return {}

    def after_save(self) -> None:
        """Do nothing: nothing is stored."""


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("fails_before", [True, False])
@pytest.mark.parametrize("failure", [CollectorFailed, NoEngineLeft, HoldTimedOut])
def test_a_step_is_saved_although_rollouts_of_later_steps_fail_around_its_sync(
    tmp_path: Path, failure: type[Failure], fails_before: bool, every: int
) -> None:
    """A resumed run makes up for the evaluation of the step."""
    ranks = FakeRanks()
    on_update = FailingSync(failure("down"), fails_before=fails_before)
    parts = ScriptedParts(comparisons=[TokenComparison(8, 0)] * 9)
    manager = make_manager(ranks, checkpoint_every=9)
    evals = {"every": every}
    with pytest.raises(failure):
        lead(parts, tmp_path, steps=9, evals=evals, checkpoints=manager, on_update=on_update)
    assert ranks.steps == [3]
    assert list(parts.metrics) == [0, 1, 2, 3]
    assert ("account/engine_tokens" in parts.metrics[3]) is not fails_before
    assert parts.released_groups == ["g"] * 3
    state = ranks.states[0].position
    assert state.selection.prompts.position == 3
    assert state.weights_synced is not fails_before
    resumed_parts = ScriptedParts()
    lead(resumed_parts, tmp_path, steps=4, evals=evals, resume_state=state)
    calls = [call[:10] for call in resumed_parts.calls if call[:4] in ("samp", "eval")]
    assert calls == [*["evaluate 3"][:every], "sample ste", "evaluate 4"]


def test_a_save_in_the_background_ends_before_a_run_with_failed_rollouts(tmp_path: Path) -> None:
    ranks = FakeRanks()
    manager = make_manager(ranks, checkpoint_every=1, background_saves=True)
    with pytest.raises(TooManyRejected):
        lead(ScriptedParts(on_sample=fail_at(3)), tmp_path, steps=9, checkpoints=manager)
    assert ranks.calls == ["begin 1", "wait", "begin 2", "wait"]


@pytest.mark.parametrize(("step", "saved_steps"), [(1, []), (3, [2])])
def test_failed_rollouts_save_nothing_that_is_saved_or_untrained(
    tmp_path: Path, step: int, saved_steps: list[int]
) -> None:
    ranks = FakeRanks()
    parts = ScriptedParts(on_sample=fail_at(step))
    with pytest.raises(TooManyRejected):
        lead(parts, tmp_path, steps=9, checkpoints=make_manager(ranks))
    assert ranks.steps == saved_steps


def test_failed_rollouts_save_nothing_without_checkpoints(tmp_path: Path) -> None:
    ranks = FakeRanks()
    manager = make_manager(ranks, checkpoint_every=0)
    with pytest.raises(TooManyRejected):
        lead(ScriptedParts(on_sample=fail_at(3)), tmp_path, steps=9, checkpoints=manager)
    assert not ranks.calls


def test_an_error_of_the_save_does_not_hide_why_the_rollouts_failed(tmp_path: Path) -> None:
    class BrokenRanks(FakeRanks):
        def run(self, command: Command) -> SaveResult | None:
            if isinstance(command, Checkpoint):
                raise RuntimeError("a rank has ended")
            return super().run(command)

    manager = make_manager(BrokenRanks(), checkpoint_every=9)
    with pytest.raises(TooManyRejected):
        lead(ScriptedParts(on_sample=fail_at(3)), tmp_path, steps=9, checkpoints=manager)


def test_a_failed_evaluation_does_not_save_the_step_before(tmp_path: Path) -> None:
    ranks = FakeRanks()
    parts = ScriptedParts()

    def fail(label: str) -> None:
        if label == "3":
            raise UserClassFailed("the judge is down")

    parts.on_measure = fail
    with pytest.raises(UserClassFailed):
        lead(parts, tmp_path, steps=9, evals={"every": 1}, checkpoints=make_manager(ranks))
    assert ranks.steps == [2, 3]
