"""The stages of a run. Stand-ins do what a stage changes."""

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.cli import compose
from megatron_rl.config.curriculum import Phase
from megatron_rl.config.curriculum import PhaseEnd, phases_of
from megatron_rl.contracts.run_state import LoopState, PhaseState, SelectorState
from megatron_rl.run.curriculum import Schedule
from tests.support.leaders import Stage, lead

SHORT = "{name: short, rollout.max_new_tokens: 24, until: {steps: 2}}"
LONG = "{name: long, rollout.max_new_tokens: 28, optimizer.lr: 1e-4, reset_certainty: all, until: {accuracy: 0.6}}"
LAST = "{name: last, data.pass_rate_range: null}"
BELIEF = ("selection=belief", "eval.every=1")


def stages(*entries: str) -> list[Phase]:
    return phases_of(compose([f"curriculum=[{','.join(entries)}]", *BELIEF]))


def of_stages(said: list[str]) -> list[str]:
    return [line for line in said if line.startswith(("enter", "parts", "widen", "draw"))]


def test_later_stages_inherit_what_earlier_ones_changed() -> None:
    short, long, last = stages(SHORT, LONG, LAST)
    assert [s.configuration.rollout.max_new_tokens for s in (short, long, last)] == [24, 28, 28]
    assert [s.configuration.optimizer.lr for s in (short, long, last)] == [3e-4, 1e-4, 1e-4]
    assert short.configuration.algo == last.configuration.algo and last.settings.until is None


def test_a_run_goes_through_its_stages(tmp_path: Path) -> None:
    stage, screen = Stage(accuracies=[0.9, 0.9, 0.9, 0.5, 0.7, 0.1]), io.StringIO()
    lead(
        stage,
        tmp_path,
        steps=5,
        evals={"every": 1},
        course=stages(SHORT, LONG, LAST),
        stream=screen,
    )
    assert of_stages(stage.said) == [
        "parts for 24 tokens",
        "enter 0",
        "draw step-1",
        "draw step-2",
        "parts for 28 tokens",
        "enter 1",
        "widen",
        "draw step-3",
        "draw step-4",
        "parts for 28 tokens",
        "enter 2",
        "draw step-5",
    ]
    assert stage.said.index("enter 0") < stage.said.index("evaluate 0 at version 0")
    assert [stage.logged[step]["stage/index"] for step in range(1, 6)] == [0, 0, 1, 1, 2]
    assert [stage.logged[step]["stage/tokens"] for step in (1, 5)] == [8, 40], "eight tokens a step"
    told = [line.split("] ")[1] for line in screen.getvalue().splitlines() if "] stage " in line]
    assert told == [
        "stage short (1 of 3) begins with step 1: rollout.max_new_tokens=24",
        "stage short ended before step 3: until.steps=2",
        "stage long (2 of 3) begins with step 3: rollout.max_new_tokens=28, optimizer.lr=0.0001",
        "stage long ended before step 5: until.accuracy=0.6, and 0.700 was measured",
        "stage last (3 of 3) begins with step 5: data.pass_rate_range=None",
    ]


def test_what_an_earlier_stage_measured_does_not_end_the_next(tmp_path: Path) -> None:
    stage = lead(
        Stage(accuracies=[0.9] * 3 + [0.5] * 9),
        tmp_path,
        steps=4,
        evals={"every": 1},
        course=stages(SHORT, LONG, LAST),
    )
    assert [stage.logged[step]["stage/index"] for step in range(1, 5)] == [0, 0, 1, 1]


def test_a_budget_that_is_spent_already_passes_over_a_stage(tmp_path: Path) -> None:
    spent = "{name: spent, until: {tokens: 10}}"
    stage = lead(Stage(), tmp_path, steps=4, course=stages(SHORT, spent, LAST))
    assert [line for line in stage.said if "enter" in line] == ["enter 0", "enter 2"]


def test_a_run_ends_with_its_last_stage(tmp_path: Path) -> None:
    screen = io.StringIO()
    stage = lead(
        Stage(),
        tmp_path,
        steps=9,
        course=stages(SHORT, "{name: end, until: {tokens: 40}}"),
        stream=screen,
    )
    assert max(stage.logged) == 5 and "save step-5" in stage.said
    assert (
        "ended after step 5 by until.tokens=40, and 40 were drawn of end, the last of stages"
        in screen.getvalue()
    )


@pytest.mark.parametrize("done", range(1, 6))
def test_a_resumed_run_goes_through_the_same_stages(tmp_path: Path, done: int) -> None:
    accuracies = [0.9, 0.9, 0.9, 0.5, 0.7, 0.1, 0.2]
    whole = Stage(accuracies=accuracies)
    course = stages(SHORT, LONG, LAST)
    lead(whole, tmp_path, steps=6, evals={"every": 1}, course=course)
    schedule = Schedule([s.settings.until for s in course])
    for step in range(1, done + 1):
        schedule.advance(step)
        schedule.note(8, accuracies[step])
    position = LoopState(
        step=done,
        version=0,
        synced=True,
        selection=SelectorState(prompts=whole.cursor),
        phase=schedule.state,
    )
    resumed = Stage(accuracies=accuracies[done + 1 :])
    resumed.state = lambda: SelectorState(prompts=whole.cursor)  # type: ignore[method-assign]
    lead(resumed, tmp_path, steps=6, evals={"every": 1}, course=course, position=position)
    kept = ("stage/index", "stage/tokens")
    for step in range(done + 1, 7):
        assert [resumed.logged[step][k] for k in kept] == [whole.logged[step][k] for k in kept]
    assert ("widen" in resumed.said) == (done < 3), (
        "beliefs that were widened already are not widened again"
    )
    assert ("enter 1" in resumed.said) == (done < 4)


untils = st.builds(
    PhaseEnd,
    steps=st.none() | st.integers(1, 30),
    tokens=st.none() | st.integers(1, 300),
    accuracy=st.none() | st.floats(0.05, 1.0),
)
steps_done = st.lists(
    st.tuples(st.integers(0, 40), st.none() | st.floats(0, 1)), min_size=1, max_size=25
)


@settings(max_examples=200)
@given(st.lists(untils, max_size=4), steps_done, st.data())
def test_stages_come_in_order_and_depend_on_the_saved_state_alone(
    ends: list[PhaseEnd], done: list[tuple[int, float | None]], data: Any
) -> None:
    schedule, resumed = Schedule([*ends, None]), Schedule([*ends, None])
    stop = data.draw(st.integers(1, len(done)))
    before, path = 0, []
    for step, (tokens, accuracy) in enumerate(done, 1):
        if step == stop:
            resumed.state = msgspec.json.decode(
                msgspec.json.encode(schedule.state), type=PhaseState
            )
        ended = schedule.advance(step)
        assert [index for index, _ in ended] == list(range(before, schedule.state.index))
        assert schedule.state.index == len(ends) or schedule.ended(step) == "", (
            "no step of a stage that has ended"
        )
        before = schedule.state.index
        path.append(before)
        if step >= stop:
            assert resumed.advance(step) == ended and resumed.state == schedule.state
            resumed.note(tokens, accuracy)
        schedule.note(tokens, accuracy)
    assert path == sorted(path)
