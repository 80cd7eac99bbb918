"""The phases of a run's curriculum, over scripted parts."""

import dataclasses
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.algorithms import CustomAlgoSettings, SftSettings
from megatron_rl.config.curriculum import Phase, PhaseEnd, phases_of
from megatron_rl.contracts.commands import EnterPhase
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.run_state import LoopState, SelectorState
from megatron_rl.losses.regularization import Regularization
from megatron_rl.models.families import read_shape
from megatron_rl.run.features.curriculum.curriculum import (
    Curriculum,
    PhaseSchedule,
    PhaseState,
    apply_phase,
)
from megatron_rl.run.loop.step_parts import StepParts
from tests.support.configurations import configuration_of
from tests.support.failures import fails
from tests.support.leaders import ScriptedParts, lead
from tests.support.policies import TWO_DIGIT_ADDITION

SHORT = "{name: short, rollout.max_new_tokens: 24, until: {steps: 2}}"
LONG = (
    "{name: long, rollout.max_new_tokens: 28, optimizer.lr: 1e-4, reset_certainty: all, "
    "until: {accuracy: 0.6}}"
)
LAST = "{name: last, data.pass_rate_range: null}"
BELIEF = ("selection=belief", "eval.every=1")


def phases_from(*entries: str) -> list[Phase]:
    return phases_of(configuration_of([f"curriculum=[{','.join(entries)}]", *BELIEF]))


def phase_calls(calls: list[str]) -> list[str]:
    verbs = ("enter", "open parts", "inflate_variance", "sample")
    return [call for call in calls if call.startswith(verbs)]


def test_later_phases_inherit_earlier_changes() -> None:
    short, long, last = phases_from(SHORT, LONG, LAST)
    assert [s.configuration.rollout.max_new_tokens for s in (short, long, last)] == [24, 28, 28]
    assert [s.configuration.optimizer.lr for s in (short, long, last)] == [3e-4, 1e-4, 1e-4]
    assert short.configuration.algo == last.configuration.algo and last.settings.until is None


def test_lost_rollouts_of_a_checkpoint_come_with_the_settings_of_its_phase() -> None:
    """The trainer computes log-probabilities at the temperature of the phase."""
    phase = "{name: hot, rollout.temperature: 1.5, rollout.samples_per_prompt: 6}"
    c = configuration_of([f"curriculum=[{SHORT},{phase}]", *BELIEF])
    short, hot = (phase.configuration for phase in phases_of(c))
    worker: Any = None
    curriculum = Curriculum(phases_of(c), worker, lambda command: None, log=print)
    assert curriculum.configuration(c) == short != c
    curriculum.restore({})
    assert curriculum.configuration(c) == short
    curriculum.restore({"index": 1})
    assert curriculum.configuration(c) == hot
    rollout = hot.rollout
    assert (rollout.temperature, rollout.samples_per_prompt, rollout.max_new_tokens) == (1.5, 6, 24)


def test_run_goes_through_its_phases(tmp_path: Path) -> None:
    parts = ScriptedParts(accuracies=[0.9, 0.9, 0.9, 0.5, 0.7, 0.1])
    screen = io.StringIO()
    lead(
        parts,
        tmp_path,
        steps=5,
        evals={"every": 1},
        phases=phases_from(SHORT, LONG, LAST),
        stream=screen,
    )
    assert phase_calls(parts.calls) == [
        "open parts for 24 tokens",
        "enter 0",
        "sample step-1",
        "sample step-2",
        "open parts for 28 tokens",
        "enter 1",
        "inflate_variance",
        "sample step-3",
        "sample step-4",
        "open parts for 28 tokens",
        "enter 2",
        "sample step-5",
    ]
    assert parts.calls.index("enter 0") < parts.calls.index("evaluate 0 at version 0")
    assert [parts.metrics[step]["phase/index"] for step in range(1, 6)] == [0, 0, 1, 1, 2]
    assert [parts.metrics[step]["phase/tokens"] for step in (1, 5)] == [8, 40], (
        "eight tokens a step"
    )
    lines = [line.split("] ")[1] for line in screen.getvalue().splitlines() if "] phase " in line]
    assert lines == [
        "phase short (1 of 3) begins with step 1: rollout.max_new_tokens=24",
        "phase short ended before step 3: until.steps=2",
        "phase long (2 of 3) begins with step 3: rollout.max_new_tokens=28, optimizer.lr=0.0001",
        "phase long ended before step 5: until.accuracy=0.6, and 0.700 was measured",
        "phase last (3 of 3) begins with step 5: data.pass_rate_range=None",
    ]


def test_accuracy_of_an_earlier_phase_does_not_end_the_next(tmp_path: Path) -> None:
    parts = lead(
        ScriptedParts(accuracies=[0.9] * 3 + [0.5] * 9),
        tmp_path,
        steps=4,
        evals={"every": 1},
        phases=phases_from(SHORT, LONG, LAST),
    )
    assert [parts.metrics[step]["phase/index"] for step in range(1, 5)] == [0, 0, 1, 1]


def test_phase_that_ends_by_accuracy_is_refused_when_rewards_have_no_correctness(
    tmp_path: Path,
) -> None:
    phases = phases_from(SHORT, LONG, LAST)
    with fails(ExitCode.REFUSED, match=r"curriculum\[long\]\.until\.accuracy=0\.6"):
        lead(ScriptedParts(accuracies=[None]), tmp_path, evals={"every": 1}, phases=phases)


def test_phase_whose_token_budget_is_exhausted_is_skipped(tmp_path: Path) -> None:
    exhausted_phase = "{name: spent, until: {tokens: 10}}"
    parts = lead(
        ScriptedParts(), tmp_path, steps=4, phases=phases_from(SHORT, exhausted_phase, LAST)
    )
    assert [line for line in parts.calls if "enter" in line] == ["enter 0", "enter 2"]


def test_phase_ends_at_exactly_its_accuracy() -> None:
    schedule = PhaseSchedule([PhaseEnd(accuracy=0.5), None])
    schedule.update(8, 0.49)
    assert schedule.advance(2) == []
    schedule.update(0, None)
    assert schedule.state.accuracy == 0.49, "the last evaluation of this phase"
    schedule.update(8, 0.5)
    assert schedule.advance(3) == [(0, "until.accuracy=0.5, and 0.500 was measured")]
    assert schedule.state == PhaseState(index=1, tokens=16)


def test_a_phase_that_has_reached_its_accuracy_ends_whatever_is_measured_then() -> None:
    """Steps that were sampled ahead still belong to the phase, and may be evaluated."""
    schedule = PhaseSchedule([PhaseEnd(accuracy=0.6), PhaseEnd(accuracy=0.9), None])
    for accuracy in (0.3, 0.7, 0.5, None, 0.65, 0.1):
        schedule.update(8, accuracy)
    assert schedule.advance(7) == [(0, "until.accuracy=0.6, and 0.700 was measured")]
    schedule.update(8, 0.8)  # the next phase starts anew
    assert schedule.ending_reason(8) == ""
    schedule.update(8, 0.95)
    assert schedule.advance(9) == [(1, "until.accuracy=0.9, and 0.950 was measured")]


def test_the_last_phase_ends_the_run_after_its_steps(tmp_path: Path) -> None:
    phases = phases_from(SHORT, "{name: end, until: {steps: 4}}")
    parts = lead(ScriptedParts(), tmp_path, steps=9, phases=phases)
    assert max(parts.metrics) == 4


@pytest.mark.slow
def test_the_current_phase_is_refused_when_it_ends_by_an_accuracy_that_is_unknown(
    tmp_path: Path,
) -> None:
    phases = phases_from("{name: only, until: {accuracy: 0.6}}")
    with fails(ExitCode.REFUSED, match=r"curriculum\[only\]\.until\.accuracy"):
        lead(ScriptedParts(accuracies=[None]), tmp_path, evals={"every": 1}, phases=phases)
    phases = phases_from(SHORT, LONG, LAST)
    parts = ScriptedParts(accuracies=[0.5, 0.5, 0.5, 0.9, None])
    lead(parts, tmp_path, steps=5, evals={"every": 1}, phases=phases)
    assert "evaluate 4 at version 4" in parts.calls, "no phase from here on ends by accuracy"


def test_prompts_and_beliefs_continue_in_the_next_phase() -> None:
    class Rollouts:
        """state: what was restored last."""

        def __init__(self, state: str) -> None:
            self.state = lambda: state

        def restore(self, state: str) -> None:
            self.state = lambda: state

        def inflate_variance(self) -> None:
            raise AssertionError("reset_certainty is not set")

    def make_parts(state: str) -> StepParts:
        nothing: Any = None
        rollouts: Any = Rollouts(state)
        return StepParts(rollouts, nothing, nothing, nothing, lambda c: make_parts("anew"))

    commands: list[Any] = []
    worker: Any = None
    phases = phases_from("{name: first, until: {steps: 1}}", "{name: second}")
    curriculum = Curriculum(phases, worker, commands.append, log=lambda text: None)
    parts = make_parts("restored from a checkpoint")
    first: Any = parts.rollouts
    curriculum.before_step(1, parts, is_under_way=False)
    second: Any = parts.rollouts
    assert second is not first and second.state() == "restored from a checkpoint"
    second.restore("after step 1")
    curriculum.before_step(2, parts, is_under_way=False)
    third: Any = parts.rollouts
    assert third is not second and third.state() == "after step 1"
    assert commands == [EnterPhase(0), EnterPhase(1)]


def test_a_phase_gives_every_rank_its_loss_temperature_and_learning_rate() -> None:
    first, second = phases_from(
        "{name: first, until: {steps: 1}}",
        "{name: second, optimizer.lr: 1e-5, rollout.temperature: 0.5, algo.alpha: 0.7}",
    )
    calls: list[tuple[Any, Any, float]] = []
    shape = read_shape(TWO_DIGIT_ADDITION)
    worker: Any = SimpleNamespace(
        policy=SimpleNamespace(
            loss="the loss of the phase before", regularization=Regularization(SftSettings())
        ),
        shape=shape,
        layout=SimpleNamespace(groups={"tp_group": None, "cp_group": None}),
        set_objective=lambda *objective: calls.append(objective),
    )
    for phase in (first, second):
        apply_phase(worker, phase.configuration)
    (loss, logprobs, lr), (other_loss, other_logprobs, other_lr) = calls
    assert (lr, other_lr) == (first.configuration.optimizer.lr, 1e-5)
    assert type(loss) is type(other_loss) and vars(loss) != vars(other_loss)
    assert vars(logprobs) != vars(other_logprobs)


def test_a_phase_keeps_a_user_defined_loss() -> None:
    (phase,) = phases_from("{name: only}")
    c = phase.configuration
    algo = CustomAlgoSettings(name="my_loss:Loss")
    calls: list[Any] = []
    worker: Any = SimpleNamespace(
        policy=SimpleNamespace(loss="the user's", regularization=Regularization(SftSettings())),
        shape=read_shape(TWO_DIGIT_ADDITION),
        layout=SimpleNamespace(groups={"tp_group": None, "cp_group": None}),
        set_objective=lambda loss, *_: calls.append(loss),
    )
    apply_phase(worker, dataclasses.replace(c, algo=algo))
    assert calls == ["the user's"]


def test_run_ends_with_its_last_phase(tmp_path: Path) -> None:
    screen = io.StringIO()
    parts = lead(
        ScriptedParts(),
        tmp_path,
        steps=9,
        phases=phases_from(SHORT, "{name: end, until: {tokens: 40}}"),
        stream=screen,
    )
    assert max(parts.metrics) == 5 and "save step-5" in parts.calls
    assert (
        "ended after step 5 by until.tokens=40, and 40 were sampled of end, the last phase"
        in screen.getvalue()
    )


@pytest.mark.slow
@pytest.mark.parametrize("last_step", range(1, 6))
def test_resumed_run_goes_through_the_same_phases(tmp_path: Path, last_step: int) -> None:
    accuracies = [0.9, 0.9, 0.9, 0.5, 0.7, 0.1, 0.2]
    whole_run = ScriptedParts(accuracies=accuracies)
    phases = phases_from(SHORT, LONG, LAST)
    lead(whole_run, tmp_path, steps=6, evals={"every": 1}, phases=phases)
    schedule = PhaseSchedule([phase.settings.until for phase in phases])
    for step in range(1, last_step + 1):
        schedule.advance(step)
        schedule.update(8, accuracies[step])
    state = LoopState(
        step=last_step,
        version=0,
        weights_synced=True,
        selection=SelectorState(prompts=whole_run.cursor),
        features={"curriculum": msgspec.to_builtins(schedule.state)},
    )
    second_run = ScriptedParts(accuracies=accuracies[last_step + 1 :])
    second_run.state = lambda: state.selection  # type: ignore[method-assign]
    lead(second_run, tmp_path, steps=6, evals={"every": 1}, phases=phases, resume_state=state)
    for step in range(last_step + 1, 7):
        for name in ("phase/index", "phase/tokens"):
            assert second_run.metrics[step][name] == whole_run.metrics[step][name]
    assert ("inflate_variance" in second_run.calls) == (last_step < 3), (
        "variances that were inflated already are not inflated again"
    )
    assert ("enter 1" in second_run.calls) == (last_step < 4)


phase_ends = st.builds(
    PhaseEnd,
    steps=st.none() | st.integers(1, 30),
    tokens=st.none() | st.integers(1, 300),
    accuracy=st.none() | st.floats(0.05, 1.0),
)
step_results = st.lists(
    st.tuples(st.integers(0, 40), st.none() | st.floats(0, 1)), min_size=1, max_size=25
)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.lists(phase_ends, max_size=4), step_results)
def test_phases_come_in_order(
    ends: list[PhaseEnd], results: list[tuple[int, float | None]]
) -> None:
    schedule = PhaseSchedule([*ends, None])
    index = 0
    for step, (tokens, accuracy) in enumerate(results, 1):
        ended_phases = schedule.advance(step)
        assert [phase for phase, _ in ended_phases] == list(range(index, schedule.state.index))
        index = schedule.state.index
        assert index == len(ends) or schedule.ending_reason(step) == ""
        schedule.update(tokens, accuracy)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.lists(phase_ends, max_size=4), step_results, st.data())
def test_phases_depend_on_the_saved_state_alone(
    ends: list[PhaseEnd], results: list[tuple[int, float | None]], data: Any
) -> None:
    schedule = PhaseSchedule([*ends, None])
    second_schedule = PhaseSchedule([*ends, None])
    resume_step = data.draw(st.integers(1, len(results)))
    for step, (tokens, accuracy) in enumerate(results, 1):
        if step == resume_step:
            data_on_disk = msgspec.json.encode(schedule.state)
            second_schedule.state = msgspec.json.decode(data_on_disk, type=PhaseState)
        ended_phases = schedule.advance(step)
        if step >= resume_step:
            assert second_schedule.advance(step) == ended_phases
            assert second_schedule.state == schedule.state
            second_schedule.update(tokens, accuracy)
        schedule.update(tokens, accuracy)
