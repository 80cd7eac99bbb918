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

from megatron_rl.config.cli import compose
from megatron_rl.config.curriculum import phases_of
from megatron_rl.config.schema import EngineSettings, GuardSettings
from megatron_rl.contracts.commands import Command, RollBack
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.run_state import (
    GuardState,
    LoopState,
    MismatchState,
    PhaseState,
    RollbackRecord,
)
from megatron_rl.rollouts.rollout_batch import NonFiniteResponses, RolloutBatch
from megatron_rl.run.checkpoints.resume import ResumePoint
from megatron_rl.run.curriculum import PhaseSchedule
from megatron_rl.run.guards.nonfinite import NonFiniteRun
from megatron_rl.run.guards.trouble import StoppedByGuard
from megatron_rl.run.leader import Leader
from tests.support.checkpoint_managers import FakeRanks, make_manager
from tests.support.checkpoints import make_state
from tests.support.leaders import ScriptedParts, lead

FLAT = (1.0,) * 8
CHECKPOINT = Path("/checkpoint")


class Ranks(FakeRanks):
    """Keeps every state that is saved, and loads them. updates: those of the present weights."""

    updates = 0

    def run(self, command: Command) -> Any:
        if not isinstance(command, RollBack):
            return super().run(command)
        self.calls.append(f"roll back before {command.first_step}")
        good_states = [
            state
            for state in self.states
            if state.step < command.first_step
            and state.optimizer_steps <= command.max_optimizer_steps
        ]
        if not good_states:
            return ResumePoint()
        target = good_states[-1]
        self.states = [state for state in self.states if state.step <= target.step]
        self.updates = target.optimizer_steps
        return ResumePoint(CHECKPOINT, target)


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
    screen = io.StringIO()
    ranks = parts.ranks
    manager = make_manager(ranks, checkpoint_every=every)
    manager.optimizer_steps = lambda: ranks.updates
    try:
        lead(parts, tmp_path, steps=steps, stream=screen, checkpoints=manager, **options)
    finally:
        parts.calls += ranks.calls
    return parts, screen.getvalue()


def test_a_spike_is_skipped_and_counted(tmp_path: Path) -> None:
    norms = (*FLAT, 20.0, 20.5, 1.0)
    guard = GuardSettings(spike="skip", spike_factor=20.0)
    parts, screen = run(Parts(norms=norms), tmp_path, 11, guard=guard)
    steps = [parts.metrics[step] for step in range(12)]
    assert [values.get("guard/skipped") for values in steps[8:]] == [0, 0, 1, 0]
    assert (steps[10]["guard/max_norm"], steps[10]["guard/spike_norm"]) == (20, 20.5)
    assert (steps[10]["account/not_applied"], steps[10]["train/nonfinite"]) == (8, 0)
    assert "guard/max_norm" not in steps[8] and parts.ranks.updates == 10
    assert "step 10: the gradients of optimizer step 1 have the norm 20.5, above 20" in screen
    assert f"The batch is in {tmp_path / 'rollouts' / 'spike-step-10'}" in screen
    assert "| spike: grad 20.50 |" in screen


def test_a_spike_does_not_enter_the_median(tmp_path: Path) -> None:
    guard = GuardSettings(spike="skip", spike_factor=2.0, window=8)
    parts, _ = run(Parts(norms=(*FLAT, *(9.0,) * 6, 1.5)), tmp_path, 15, guard=guard)
    assert parts.metrics[15]["guard/max_norm"] == 2.0


def test_the_window_forgets_old_norms(tmp_path: Path) -> None:
    guard = GuardSettings(spike="skip", spike_factor=2.0, window=8)
    parts, _ = run(Parts(norms=(*FLAT, *(1.5,) * 8, 2.9)), tmp_path, 17, guard=guard)
    assert parts.metrics[17]["guard/max_norm"] == 3.0 and parts.ranks.updates == 17


def test_the_first_norms_are_not_judged_and_without_a_guard_none_is(tmp_path: Path) -> None:
    guard = GuardSettings(spike="stop")
    parts, _ = run(Parts(norms=(*FLAT[1:], 999.0, 1.0)), tmp_path, 9, guard=guard)
    assert parts.ranks.updates == 9
    parts, _ = run(Parts(norms=(*FLAT, 999.0)), tmp_path, 9)
    assert parts.ranks.updates == 9
    assert not any(name.startswith("guard/") for name in parts.metrics[9])


def test_too_many_skips_in_a_row_end_the_run(tmp_path: Path) -> None:
    guard = GuardSettings(spike="skip", max_skips=3)
    norms = (*FLAT, 99.0, 99.0, 1.0, 99.0, 99.0, 99.0)
    parts = Parts(norms=norms)
    with pytest.raises(StoppedByGuard, match=r"3 consecutive steps .*guard\.max_skips=3") as error:
        run(parts, tmp_path, 20, guard=guard)
    assert error.value.exit_code == ExitCode.NON_FINITE == 5
    assert max(parts.metrics) == 14


def test_a_spike_can_stop_the_run_with_a_record_of_its_step(tmp_path: Path) -> None:
    parts = Parts(norms=(*FLAT, 99.0))
    with pytest.raises(StoppedByGuard, match=r"norm 99, above 10 .*guard\.spike=stop"):
        run(parts, tmp_path, 20, guard=GuardSettings(spike="stop"))
    assert parts.metrics[9]["guard/spike_norm"] == 99


def test_a_rollback_goes_on_from_a_checkpoint_with_new_prompts(tmp_path: Path) -> None:
    """Checkpoints after steps 3, 6 and 9. Step 11 has a spike: steps 10 and 11 are lost."""
    norms = (*FLAT, 1.0, 1.0, 99.0, 1.0)
    guard = GuardSettings(spike="rollback")
    parts, screen = run(Parts(norms=norms), tmp_path, 12, every=3, guard=guard)
    calls = parts.calls
    assert [call for call in calls if call.startswith(("save ", "roll"))] == [
        *("save step-12", "save 3", "save 6", "save 9"),
        *("roll back before 11", "save 11", "save 12"),
    ]
    values = parts.metrics[11]
    assert (values["guard/rollbacks"], values["guard/rolled_back_to"]) == (1, 9)
    assert values["account/rolled_back"] == 8, "step 10 trained, step 11 was not applied"
    assert (values["account/not_applied"], values["account/unaccounted"]) == (8, 0)
    assert values["time/rollback"] >= 0
    assert list(parts.metrics) == list(range(13)) and parts.metrics[12]["guard/rollbacks"] == 0
    assert parts.cursor.position == 12, "every step has prompts of its own"
    assert parts.version == 12 and parts.audits == [11]
    assert parts.ranks.updates == 9 + 1
    state = parts.ranks.states[-1].position.guard
    assert state.trained_tokens == 8 * 10
    assert state.norms == (1.0,) * 10, "of the steps to 9 and of step 12"
    line = (
        "Rolled back to the checkpoint of step 9: 8 trained tokens are lost (account/rolled_back), "
        "and newer checkpoints are removed. The run goes on with step 12 and new prompts"
    )
    assert line in screen


def test_a_rollback_returns_to_the_evaluations_of_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[PhaseState | None] = []
    monkeypatch.setattr(PhaseSchedule, "roll_back", lambda self, state: states.append(state))
    phases = phases_of(compose(["eval.every=1", "curriculum=[{name: a, until: {accuracy: 0.9}}]"]))
    parts = Parts(norms=(*FLAT, 1.0, 1.0, 99.0, 1.0), accuracies=[n / 100 for n in range(13)])
    guard = GuardSettings(spike="rollback")
    run(parts, tmp_path, 12, every=3, guard=guard, evals={"every": 1}, phases=phases)
    assert states == [PhaseState(index=0, tokens=9 * 8, accuracy=0.09)]


def test_tokens_of_steps_ahead_that_a_rollback_and_the_end_drop_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both happen in the last step."""
    # Scripted rollouts have version 0, whatever the step is
    monkeypatch.setattr(Leader, "_ahead_metrics", lambda self, batch: {})
    parts = Parts(norms=(*FLAT, 1.0, 99.0))
    dropped_tokens = iter([700, 30])
    parts.drop_open = lambda: next(dropped_tokens)  # type: ignore[method-assign]
    guard = GuardSettings(spike="rollback")
    run(parts, tmp_path, 10, guard=guard, max_staleness=1)
    assert parts.metrics[10]["account/rolled_back"] > 0
    assert parts.metrics[10]["account/unfinished"] == 730.0


def test_an_equal_checkpoint_is_taken_once_and_an_older_one_if_the_spike_returns(
    tmp_path: Path,
) -> None:
    """Step 9 returns to 8, whose weights step 9 has. Step 10 has a spike again: it returns to 6."""
    norms = (*FLAT, 99.0, 99.0, 1.0)
    guard = GuardSettings(spike="rollback")
    parts, _ = run(Parts(norms=norms), tmp_path, 11, guard=guard)
    targets = [parts.metrics[step].get("guard/rolled_back_to") for step in (9, 10, 11)]
    assert targets == [8, 6, None]
    lost_tokens = [parts.metrics[step].get("account/rolled_back") for step in (9, 10)]
    assert lost_tokens == [0, 16]
    assert [state.step for state in parts.ranks.states] == [2, 4, 6, 10, 11]


def test_a_repetition_without_another_checkpoint_ends_the_run(tmp_path: Path) -> None:
    parts = Parts(norms=(*FLAT, 99.0, 99.0))
    message = r"no checkpoint from before step 10 with other weights than the present ones"
    with pytest.raises(StoppedByGuard, match=message):
        run(parts, tmp_path, 20, every=8, guard=GuardSettings(spike="rollback"))
    assert parts.metrics[9]["guard/rolled_back_to"] == 8


def test_too_many_rollbacks_in_a_window_end_the_run(tmp_path: Path) -> None:
    norms = (*FLAT, 1.0, 99.0, 1.0, 99.0, 1.0, 99.0, 1.0)
    guard = GuardSettings(spike="rollback", max_rollbacks=2)
    parts = Parts(norms=norms)
    with pytest.raises(
        StoppedByGuard, match=r"rolled back 2 times in the last guard\.rollback_window=100 steps"
    ):
        run(parts, tmp_path, 20, every=1, guard=guard)
    assert max(parts.metrics) == 14
    guard = GuardSettings(spike="rollback", max_rollbacks=1, rollback_window=2)
    parts, _ = run(Parts(norms=norms), tmp_path, 15, every=1, guard=guard)
    assert sum(values.get("guard/rollbacks", 0) for values in parts.metrics.values()) == 3


def test_a_rollback_without_a_checkpoint_ends_the_run(tmp_path: Path) -> None:
    parts = Parts(norms=(*FLAT, 99.0))
    with pytest.raises(StoppedByGuard, match=r"no checkpoint from before step 9 to roll back to"):
        run(parts, tmp_path, 20, every=10, guard=GuardSettings(spike="rollback"))


def test_collapsing_entropy_returns_to_before_the_policy_that_showed_it(tmp_path: Path) -> None:
    """Step 4 measures the policy of step 3, so that checkpoint 3 is not good."""
    entropies = [1.0, 0.05, 1.0, 0.09, 0.08, 0.07, 1.0]
    guard = GuardSettings(entropy="rollback", min_entropy=0.1, patience=3)
    parts, screen = run(Parts(entropies=entropies), tmp_path, 7, every=1, guard=guard)
    assert parts.metrics[6]["guard/rolled_back_to"] == 2
    assert parts.metrics[6]["account/rolled_back"] == 8 * 4, "steps 3 to 6"
    assert "policy/entropy 0.07 is below guard.min_entropy=0.1" in screen
    assert [state.step for state in parts.ranks.states] == [1, 2, 6, 7]


def test_entropy_counts_anew_after_a_rollback_and_can_stop_the_run(tmp_path: Path) -> None:
    guard = GuardSettings(entropy="rollback", min_entropy=0.1, patience=2)
    entropies = [1.0, 1.0, 1.0, 0.05, 0.05, 0.05, 1.0]
    parts, _ = run(Parts(entropies=entropies), tmp_path, 7, every=1, guard=guard)
    assert sum(values.get("guard/rollbacks", 0) for values in parts.metrics.values()) == 1
    guard = GuardSettings(entropy="stop", min_entropy=0.1, patience=2)
    parts = Parts(entropies=entropies)
    with pytest.raises(StoppedByGuard, match=r"guard\.patience=2 .*guard\.entropy=stop"):
        run(parts, tmp_path, 7, guard=guard)
    assert max(parts.metrics) == 5


def test_nan_is_skipped_and_rolls_back_after_consecutive_steps(tmp_path: Path) -> None:
    """Checkpoints 2 and 4. NaN in steps 5 and 6 with the weights of 4, so that 2 is loaded."""
    finite = [True, True, False, True, False, False, True]
    guard = GuardSettings(nonfinite="rollback")
    parts, screen = run(Parts(finite=finite), tmp_path, 7, guard=guard, max_nonfinite_steps=2)
    assert parts.metrics[6]["guard/rolled_back_to"] == 2
    assert parts.metrics[6]["account/rolled_back"] == 8, "step 4 trained"
    assert parts.metrics[3].get("guard/rolled_back_to") is None
    assert "2 consecutive steps had NaN or Inf" in screen
    counts = {state.step: state.position.nonfinite for state in parts.ranks.states}
    assert counts == {2: 0, 6: 0, 7: 0}


def test_nan_can_stop_the_run_at_once(tmp_path: Path) -> None:
    parts = Parts(finite=[True, False])
    with pytest.raises(NonFiniteRun, match=r"1 step had NaN .*guard\.nonfinite=stop"):
        run(parts, tmp_path, 9, guard=GuardSettings(nonfinite="stop"), max_nonfinite_steps=9)
    assert max(parts.metrics) == 2


class NanParts(Parts):
    """The responses of some steps are NaN. nan_steps: their steps."""

    nan_steps: tuple[int, ...] = ()

    def sample(self, step: int) -> RolloutBatch:
        batch = super().sample(step)
        if step in self.nan_steps:
            raise NonFiniteResponses(f"batch step-{step}: NaN", batch)
        return batch


def test_responses_with_nan_roll_back_to_weights_that_engines_did_not_have(tmp_path: Path) -> None:
    """Engines answer step 5 with the weights of step 4. The batch is released and accounted."""
    parts = NanParts()
    parts.nan_steps = (5,)
    guard = GuardSettings(nonfinite="rollback")
    run(parts, tmp_path, 6, every=1, guard=guard)
    assert parts.metrics[5]["guard/rolled_back_to"] == 3
    assert parts.metrics[5]["account/rolled_back"] == 16
    assert len(parts.released_groups) == 6


def test_responses_with_nan_that_are_sampled_again_roll_back(tmp_path: Path) -> None:
    class NanAgainParts(Parts):
        def sample_again(
            self, step: int, batch: RolloutBatch, rollout_ids: Sequence[str]
        ) -> RolloutBatch:
            batch = super().sample_again(step, batch, rollout_ids)
            raise NonFiniteResponses(f"batch step-{step}: NaN", batch)

    parts = NanAgainParts(lost_rollouts=[(), (), (), (), ("r1",)])
    run(parts, tmp_path, 6, every=1, guard=GuardSettings(nonfinite="rollback"))
    assert parts.metrics[5]["guard/rolled_back_to"] == 3
    assert len(parts.released_groups) == 6


@pytest.mark.parametrize("action", ["skip", "stop"])
def test_responses_with_nan_end_the_run_without_rollback(tmp_path: Path, action: Any) -> None:
    parts = NanParts()
    parts.nan_steps = (3,)
    failure = NonFiniteRun if action == "stop" else NonFiniteResponses
    with pytest.raises(failure, match="batch step-3: NaN") as error:
        run(parts, tmp_path, 6, guard=GuardSettings(nonfinite=action))
    assert error.value.exit_code == (5 if action == "stop" else 4)


def test_evaluations_of_lost_weights_do_not_end_the_run(tmp_path: Path) -> None:
    """The weights of step 9 are evaluated well, and lost in step 10, which is evaluated after it.

    The mean of both evaluations would end the run.
    """
    evals = {"every": 1, "stop_at": 0.8, "stop_average": 2, "start_step": 9}
    norms = (*FLAT, 1.0, 99.0, 1.0)
    parts = Parts(norms=norms, accuracies=[0.9, 0.9, 0.1, 0.1])
    run(parts, tmp_path, 12, every=8, evals=evals, guard=GuardSettings(spike="rollback"))
    assert list(parts.metrics) == list(range(13))


def test_the_history_of_the_guards_survives_in_a_checkpoint(tmp_path: Path) -> None:
    guard = GuardSettings(
        spike="skip", entropy="rollback", min_entropy=0.1, patience=3, max_skips=2
    )
    norms = (*FLAT, 99.0)
    entropies = [1.0] * 7 + [0.05, 0.05]
    parts, _ = run(Parts(norms=norms, entropies=entropies), tmp_path, 9, every=3, guard=guard)
    state = parts.ranks.states[-1].position
    assert state.guard == GuardState(
        norms=FLAT, skips=1, low_entropy_since=8, low_entropy_steps=2, trained_tokens=64
    )
    resumed_parts = Parts(parts.ranks, norms=(99.0,))
    with pytest.raises(StoppedByGuard, match="2 consecutive steps had a spike"):
        run(resumed_parts, tmp_path, 12, guard=guard, resume_state=state)
    resumed_parts = Parts(parts.ranks, entropies=[0.05])
    run(resumed_parts, tmp_path, 10, guard=guard, resume_state=state)
    assert resumed_parts.metrics[10]["guard/rolled_back_to"] == 6
    assert resumed_parts.metrics[10]["account/rolled_back"] == 8 * 3, "steps 7, 8 and 10"


def test_a_resumed_run_compares_fp8_with_its_bfloat16_steps(tmp_path: Path) -> None:
    engine = EngineSettings(dtype="bfloat16")
    parts, screen = run(Parts(mismatches=(0.001, 0.003)), tmp_path, 2, engine=engine)
    assert "mismatch/bf16/k3_kl" not in parts.metrics[2] and "warning" not in screen
    state = parts.ranks.states[-1].position
    assert state.bf16_mismatch == MismatchState(steps=2, k3_sum=0.004)
    resumed_parts = Parts(parts.ranks, mismatches=(0.009, 0.011))
    engine = EngineSettings(quantization="fp8")
    _, screen = run(resumed_parts, tmp_path, 4, engine=engine, resume_state=state)
    for step in (3, 4):
        assert resumed_parts.metrics[step]["mismatch/bf16/k3_kl"] == 0.002
    assert screen.count("mismatch/k3_kl 0.011 is 5.5 times that of bfloat16 engines") == 1
    assert parts.ranks.states[-1].position.bf16_mismatch == state.bf16_mismatch


def test_rollbacks_before_a_resume_count(tmp_path: Path) -> None:
    record = RollbackRecord(step=3, target=2, optimizer_steps=1)
    state = make_state(8, guard=GuardState(norms=FLAT, rollbacks=(record,))).position
    parts = Parts(norms=(99.0,))
    guard = GuardSettings(spike="rollback", max_rollbacks=1)
    with pytest.raises(StoppedByGuard, match="rolled back 1 times"):
        run(parts, tmp_path, 20, guard=guard, resume_state=state)


def test_a_checkpoint_of_an_older_version_resumes_without_history() -> None:
    state = make_state(4).position
    text = msgspec.json.decode(msgspec.json.encode(state))
    del text["guard"]
    assert msgspec.json.decode(msgspec.json.encode(text), type=LoopState) == state
