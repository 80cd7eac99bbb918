"""Reactions of a run to loss spikes, collapsing entropy and NaN, over scripted ranks.

Each step trains 8 tokens in one optimizer step.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_rl.config.schema import EngineSettings, GuardSettings
from megatron_rl.contracts.commands import Checkpoint, Command
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.group import RolloutRef
from megatron_rl.contracts.run_state import BestState
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.records.progress import Progress
from megatron_rl.rollouts.steps.rollout_batch import NonFiniteResponses, RolloutBatch
from megatron_rl.run.checkpoints.store import CheckpointStore
from megatron_rl.run.features.guards.guards import GuardState
from megatron_rl.run.features.guards.nonfinite import NonFiniteGuard
from megatron_rl.run.features.guards.stopped_by_guard import StoppedByGuard
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.worker import TrainOutcome
from tests.support.checkpoint_managers import FakeRanks, make_manager
from tests.support.leaders import ScriptedParts, lead
from tests.support.rollout_refs import make_ref
from tests.support.rollouts import make_rollout

FLAT = (1.0,) * 8


class Ranks(FakeRanks):
    """Keeps every state that is saved, and makes its folder. updates: of the weights."""

    updates = 0

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.folder = folder

    def run(self, command: Command) -> Any:
        if self.folder is not None and isinstance(command, Checkpoint):
            CheckpointStore(self.folder).path(command.step).mkdir(parents=True)
        return super().run(command)


class Parts(ScriptedParts):
    """Counts updates in `ranks`.

    entropies, mismatches: policy/entropy and mismatch/k3_kl of each step.
    """

    def __init__(
        self,
        ranks: Ranks | None = None,
        *,
        entropies: Sequence[float] = (),
        mismatches: Sequence[float] = (),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.ranks = ranks or Ranks()
        self._values = {"policy/entropy": iter(entropies), "mismatch/k3_kl": iter(mismatches)}

    def run(self, command: Command) -> Any:
        self.extra_metrics = {}
        if type(command).__name__ == "Train":
            values = {name: next(values, None) for name, values in self._values.items()}
            self.extra_metrics = {n: value for n, value in values.items() if value is not None}
        result = super().run(command)
        self.ranks.updates += getattr(result, "optimizer_steps", 0)
        return result


def run(
    parts: Parts, tmp_path: Path, steps: int, *, every: int = 2, **options: Any
) -> tuple[Parts, str]:
    """Train and return the parts and what was printed."""
    screen = options.pop("stream", None) or io.StringIO()
    ranks = parts.ranks
    manager = make_manager(ranks, checkpoint_every=every)
    manager.optimizer_steps = lambda: ranks.updates
    try:
        lead(parts, tmp_path, steps=steps, stream=screen, checkpoints=manager, **options)
    finally:
        parts.calls += ranks.calls
    return parts, screen.getvalue()


def test_a_spike_is_skipped_and_counted(tmp_path: Path) -> None:
    norms = (*FLAT, 10.0, 10.5, 1.0)
    guard = GuardSettings(spike="skip")
    parts, screen = run(Parts(norms=norms), tmp_path, 11, guard=guard)
    steps = [parts.metrics[step] for step in range(12)]
    assert [values.get("guard/skipped") for values in steps[8:]] == [0, 0, 1, 0]
    assert (steps[10]["guard/max_norm"], steps[10]["guard/spike_norm"]) == (10, 10.5)
    assert (steps[10]["account/not_applied"], steps[10]["train/nonfinite"]) == (8, 0)
    assert "guard/max_norm" not in steps[8] and parts.ranks.updates == 10
    assert "step 10: the gradients of optimizer step 1 have the norm 10.5, above 10" in screen
    assert f"The batch is in {tmp_path / 'rollouts' / 'spike-step-10'}" in screen
    assert "| spike: grad 10.50 |" in screen


def test_a_spike_does_not_enter_the_median(tmp_path: Path) -> None:
    guard = GuardSettings(spike="skip")
    parts, _ = run(Parts(norms=(*FLAT, *(11.0,) * 9, 1.5)), tmp_path, 18, guard=guard)
    assert parts.metrics[18]["guard/max_norm"] == 10.0


def test_the_window_forgets_old_norms(tmp_path: Path) -> None:
    guard = GuardSettings(spike="skip")
    norms = ((1.0,) * 32, (1.5,) * 17, (14.9,))
    parts, _ = run(Parts(norms=sum(norms, ())), tmp_path, 50, guard=guard)
    assert parts.metrics[50]["guard/max_norm"] == 15.0 and parts.ranks.updates == 50


def test_the_first_norms_are_not_judged_and_without_a_guard_none_is(tmp_path: Path) -> None:
    guard = GuardSettings(spike="stop")
    parts, _ = run(Parts(norms=(*FLAT[1:], 999.0, 1.0)), tmp_path, 9, guard=guard)
    assert parts.ranks.updates == 9
    parts, _ = run(Parts(norms=(*FLAT, 999.0)), tmp_path, 9)
    assert parts.ranks.updates == 9
    assert not any(name.startswith("guard/") for name in parts.metrics[9])


def test_too_many_skips_in_a_row_end_the_run(tmp_path: Path) -> None:
    guard = GuardSettings(spike="skip")
    norms = (*FLAT, 99.0, 99.0, 1.0, *(99.0,) * 10)
    parts = Parts(norms=norms)
    with pytest.raises(StoppedByGuard, match=r"10 consecutive steps .*guard\.spike=skip") as error:
        run(parts, tmp_path, 25, guard=guard)
    assert error.value.exit_code == ExitCode.NON_FINITE == 5
    assert max(parts.metrics) == 21


def test_a_spike_can_stop_the_run_with_a_record_of_its_step(tmp_path: Path) -> None:
    parts = Parts(norms=(*FLAT, 99.0))
    with pytest.raises(StoppedByGuard, match=r"norm 99, above 10 .*guard\.spike=stop"):
        run(parts, tmp_path, 20, guard=GuardSettings(spike="stop"))
    assert parts.metrics[9]["guard/spike_norm"] == 99


def test_nan_can_stop_the_run_at_once(tmp_path: Path) -> None:
    parts = Parts(finite=[True, False])
    with pytest.raises(StoppedByGuard, match=r"1 step had NaN .*guard\.nonfinite=stop"):
        run(parts, tmp_path, 9, guard=GuardSettings(nonfinite="stop"))
    assert max(parts.metrics) == 2


class NanParts(Parts):
    """The responses of some steps are NaN. nan_steps: their steps."""

    nan_steps: tuple[int, ...] = ()

    def sample(self, step: int) -> RolloutBatch:
        batch = super().sample(step)
        if step in self.nan_steps:
            raise NonFiniteResponses(f"batch step-{step}: NaN")
        return batch


@pytest.mark.parametrize("action", ["skip", "stop"])
def test_responses_with_nan_end_the_run(tmp_path: Path, action: Any) -> None:
    parts = NanParts()
    parts.nan_steps = (3,)
    failure = StoppedByGuard if action == "stop" else NonFiniteResponses
    with pytest.raises(failure, match="batch step-3: NaN") as error:
        run(parts, tmp_path, 6, guard=GuardSettings(nonfinite=action))
    assert error.value.exit_code == (5 if action == "stop" else 4)


def test_the_history_of_the_guards_survives_in_a_checkpoint(tmp_path: Path) -> None:
    guard = GuardSettings(spike="skip", min_entropy=0.1)
    norms = (*FLAT, *(99.0,) * 9)
    entropies = [1.0] * 15 + [0.05, 0.05]
    parts, _ = run(Parts(norms=norms, entropies=entropies), tmp_path, 17, every=17, guard=guard)
    state = parts.ranks.states[-1].position
    assert msgspec.convert(state.features["guards"], GuardState) == GuardState(
        norms=FLAT, skips=9, low_entropy_since=16, low_entropy_steps=2
    )
    resumed_parts = Parts(parts.ranks, norms=(99.0,))
    with pytest.raises(StoppedByGuard, match="10 consecutive steps had a spike"):
        run(resumed_parts, tmp_path, 20, guard=guard, resume_state=state)
    resumed_parts = Parts(parts.ranks, entropies=[0.05])
    with pytest.raises(StoppedByGuard, match=r"below guard\.min_entropy=0\.1"):
        run(resumed_parts, tmp_path, 20, guard=guard, resume_state=state)
    assert max(resumed_parts.metrics) == 18


def checkpoint_names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())


def test_collapsing_entropy_leaves_checkpoints_from_before_the_policy_that_showed_it(
    tmp_path: Path,
) -> None:
    """Step 4 measures the policy of step 3, so that checkpoint 3 is not good."""
    entropies = [1.0, 0.05, 1.0, 0.09, 0.08, 0.07, 1.0]
    guard = GuardSettings(min_entropy=0.1)
    parts = Parts(Ranks(tmp_path / "checkpoints"), entropies=entropies)
    screen = io.StringIO()
    with pytest.raises(StoppedByGuard, match=r"entropy 0\.07 .*resume=auto goes on after step 2"):
        run(parts, tmp_path, 7, every=1, guard=guard, stream=screen)
    assert max(parts.metrics) == 6
    good_names = [f"iter_000000{step}" for step in (1, 2)]
    names = good_names + [f"iter_000000{step}.damaged-1" for step in (3, 4, 5)]
    assert checkpoint_names(tmp_path) == names
    assert "the weights of step 5 may be at fault: they are in iter_0000005.damaged-1" in (
        screen.getvalue()
    )


def test_entropy_must_be_low_in_consecutive_steps(tmp_path: Path) -> None:
    guard = GuardSettings(min_entropy=0.1)
    parts = Parts(entropies=[1.0, 0.05, 0.05, 1.0, 0.05, 0.05, 1.0])
    run(parts, tmp_path, 7, guard=guard)
    assert max(parts.metrics) == 7


def test_a_guard_that_stops_without_a_good_checkpoint_says_so(tmp_path: Path) -> None:
    guard = GuardSettings(min_entropy=0.1)
    parts = Parts(Ranks(tmp_path / "checkpoints"), entropies=[0.05, 0.05, 0.05])
    with pytest.raises(StoppedByGuard, match="No checkpoint from before step 0 is left"):
        run(parts, tmp_path, 9, every=1, guard=guard)
    assert checkpoint_names(tmp_path) == ["iter_0000001", "iter_0000002"]


def test_checkpoints_of_consecutive_steps_with_nan_are_set_aside(tmp_path: Path) -> None:
    """A run that resumes from one, with its count of these steps, would stop too soon."""
    parts = Parts(Ranks(tmp_path / "checkpoints"), finite=[True, True, False, False, False])
    with pytest.raises(StoppedByGuard, match=r"3 consecutive .*goes on after step 2"):
        run(parts, tmp_path, 9, every=1)
    good_names = ["iter_0000001", "iter_0000002"]
    bad_names = [f"iter_000000{step}.damaged-1" for step in (3, 4)]
    assert checkpoint_names(tmp_path) == good_names + bad_names


def test_a_best_checkpoint_that_is_set_aside_is_the_best_no_longer(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    parts = Parts(Ranks(store.folder), entropies=[1.0, 1.0, 0.05, 0.05, 0.05])
    store.folder.mkdir()
    store.set_best(BestState(metric="eval/accuracy", value=0.9, step=3))
    guard = GuardSettings(min_entropy=0.1)
    with pytest.raises(StoppedByGuard, match="goes on after step 1"):
        run(parts, tmp_path, 9, every=1, guard=guard)
    assert not store.best_link.is_symlink() and not (tmp_path / "best.json").exists()


def test_responses_with_nan_leave_checkpoints_of_weights_that_engines_did_not_have(
    tmp_path: Path,
) -> None:
    """Engines answer step 5 with the weights of step 4."""
    parts = NanParts(Ranks(tmp_path / "checkpoints"))
    parts.nan_steps = (5,)
    with pytest.raises(StoppedByGuard, match="resume=auto goes on after step 3"):
        run(parts, tmp_path, 6, every=1, guard=GuardSettings(nonfinite="stop"))
    assert checkpoint_names(tmp_path)[-2:] == ["iter_0000003", "iter_0000004.damaged-1"]


def test_responses_with_nan_that_are_sampled_again_stop_the_run(tmp_path: Path) -> None:
    class NanAgainParts(Parts):
        def sample_again(
            self, step: int, batch: RolloutBatch, rollout_ids: Sequence[str]
        ) -> RolloutBatch:
            raise NonFiniteResponses(f"batch step-{step}: NaN")

    parts = NanAgainParts(lost_rollouts=[(), (), (), (), ("r1",)])
    with pytest.raises(StoppedByGuard, match="batch step-5: NaN"):
        run(parts, tmp_path, 6, every=1, guard=GuardSettings(nonfinite="stop"))


def test_a_spike_that_stops_the_run_leaves_every_checkpoint(tmp_path: Path) -> None:
    """No rank applied the step."""
    parts = Parts(Ranks(tmp_path / "checkpoints"), norms=(*FLAT, 99.0))
    with pytest.raises(StoppedByGuard, match="resume=auto goes on after step 8"):
        run(parts, tmp_path, 20, every=4, guard=GuardSettings(spike="stop"))
    assert checkpoint_names(tmp_path) == ["iter_0000004", "iter_0000008"]


def test_a_resumed_run_compares_fp8_with_its_bfloat16_steps(tmp_path: Path) -> None:
    engine = EngineSettings(dtype="bfloat16")
    parts, screen = run(Parts(mismatches=(0.001, 0.003)), tmp_path, 2, engine=engine)
    assert "mismatch/bf16/k3_kl" not in parts.metrics[2] and "warning" not in screen
    state = parts.ranks.states[-1].position
    assert state.features["alarms"] == {"steps": 2, "k3_sum": 0.004}
    resumed_parts = Parts(parts.ranks, mismatches=(0.009, 0.011))
    engine = EngineSettings(quantization="fp8")
    _, screen = run(resumed_parts, tmp_path, 4, engine=engine, resume_state=state)
    for step in (3, 4):
        assert resumed_parts.metrics[step]["mismatch/bf16/k3_kl"] == 0.002
    assert screen.count("mismatch/k3_kl 0.011 is 5.5 times its value with bfloat16 engines") == 1
    assert parts.ranks.states[-1].position.features["alarms"] == state.features["alarms"]


def plan_of(step: int, *rollouts: RolloutRef) -> StepPlan:
    advantages = (0.0,) * len(rollouts)
    return StepPlan(step=step, rollouts=rollouts, advantages=advantages, optimizer_steps=())


def test_steps_without_rollouts_do_not_shorten_the_trouble(tmp_path: Path) -> None:
    """NaN in steps 3, 5 and 6, and step 4 trains nothing: checkpoint 3 is from the trouble."""
    rollout = make_ref(make_rollout(2, 2))
    progress = Progress(9, is_enabled=False)
    guard = NonFiniteGuard(tmp_path, progress)
    outcome = TrainOutcome(False, 0, MetricSums(), {})
    empty_outcome = TrainOutcome(True, 0, MetricSums(), {})
    guard.observe(plan_of(3, rollout), outcome)
    guard.observe(plan_of(4), empty_outcome)
    guard.observe(plan_of(5, rollout), outcome)
    with pytest.raises(StoppedByGuard) as error:
        guard.observe(plan_of(6, rollout), outcome)
    assert error.value.first_step == 3
