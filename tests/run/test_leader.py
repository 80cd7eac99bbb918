"""The order of the calls of a run: when it evaluates, syncs and stops."""

import contextlib
import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_rl.config.schema import CreditSettings, EngineSettings, EvalSettings
from megatron_rl.contracts.commands import Command, Train
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.run_state import PromptCursor, SelectorState
from megatron_rl.engines.token_counter import TokenComparison
from megatron_rl.records.progress import Progress
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch
from megatron_rl.run.end_conditions import is_accuracy_reached
from megatron_rl.run.features.guards.stopped_by_guard import StoppedByGuard
from megatron_rl.run.features.observer import Observer
from megatron_rl.run.loop.trained_step import TrainedStep
from tests.support.checkpoints import make_state
from tests.support.failures import fails
from tests.support.groups import group
from tests.support.leaders import ScriptedParts, lead


@pytest.mark.slow
def test_order_of_calls_in_a_run(tmp_path: Path) -> None:
    parts = lead(ScriptedParts(), tmp_path)
    assert parts.calls == [
        "sync 0",
        "evaluate 0 at version 0",
        "sample step-1",
        "train 1",
        "sync 1",
        "sample step-2",
        "train 2",
        "sync 2",
        "evaluate 2 at version 2",
        "save step-2",
        "finish",
        "stop",
    ]
    assert parts.released_groups == ["g", "g"]
    assert parts.metrics[1]["sync/version"] == 1 and parts.metrics[2]["eval/accuracy"] == 0.5


def test_the_next_step_is_sampled_before_the_engines_get_new_weights(tmp_path: Path) -> None:
    current = group(1.0, 0.0, name="g")
    rollouts = [msgspec.structs.replace(r, tokens_by_version=()) for r in current.rollouts]
    current = msgspec.structs.replace(current, rollouts=tuple(rollouts))
    parts = lead(ScriptedParts(groups=[current]), tmp_path, steps=3, max_staleness=1)
    assert parts.calls == [
        "sync 0",
        "evaluate 0 at version 0",
        "sample step-1",
        "train 1",
        "sample step-2",
        "sync 1",
        "train 2",
        "sample step-3",
        "sync 2",
        "train 3",
        "sync 3",
        "evaluate 3 at version 3",
        "save step-3",
        "finish",
        "stop",
    ]
    assert parts.begun_steps == [1, 2, 3]
    assert parts.num_refreshes == 4  # one before each sync
    # Of the evaluation, of two steps, and of one step each
    assert parts.counted_tokens == [5, 16, 8, 0, 5]
    assert parts.metrics[3]["account/unfinished"] == 0.0
    for step in (1, 2, 3):
        assert parts.metrics[step]["rollout/in_flight"] == 5.0
        assert parts.metrics[step]["time/engines_idle"] == 0.25
    assert parts.train_versions == [0, 1, 2]


def test_a_run_that_samples_nothing_ahead_has_no_metrics_of_it(tmp_path: Path) -> None:
    parts = lead(ScriptedParts(), tmp_path, steps=1)
    assert not {"rollout/in_flight", "time/engines_idle"} & parts.metrics[1].keys()
    assert parts.train_versions == [None]


def test_a_rollout_above_the_bound_is_not_trained_in_silence(tmp_path: Path) -> None:
    """All scripted rollouts are of version 0."""
    with pytest.raises(RuntimeError, match=r"age 2 .* rollout\.max_staleness=1"):
        lead(ScriptedParts(), tmp_path, steps=3, max_staleness=1)


def test_rollouts_of_a_step_that_is_never_trained_are_unfinished(tmp_path: Path) -> None:
    parts = lead(
        ScriptedParts(accuracies=[0.7, 0.9]),
        tmp_path,
        steps=9,
        max_staleness=1,
        evals={"every": 2, "stop_at": 0.8},
    )
    assert [call for call in parts.calls if call.startswith("train")] == ["train 1", "train 2"]
    assert parts.metrics[2]["account/unfinished"] == 8.0
    assert parts.released_groups == ["g", "g", "g"]


def test_every_long_command_says_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    active_tasks: list[str] = []
    tasks: dict[str, list[str]] = {}

    @contextlib.contextmanager
    def note(progress: Progress, name: str) -> Iterator[None]:
        active_tasks.append(name)
        yield
        active_tasks.pop()

    class Parts(ScriptedParts):
        def run(self, command: Command) -> Any:
            tasks[type(command).__name__] = list(active_tasks)
            return super().run(command)

    monkeypatch.setattr(Progress, "task", note)
    lead(Parts(), tmp_path, steps=1)
    assert tasks == {
        "Sync": ["sending the weights to the engines"],
        "Train": ["training on the batch of step 1"],
        "Save": [f"writing the weights to {tmp_path / 'checkpoints' / 'step-1'}"],
    }


def test_evaluations_follow_every_and_start_step(tmp_path: Path) -> None:
    def evaluated_steps(**evals: int) -> list[str]:
        calls = lead(ScriptedParts(), tmp_path, steps=7, evals=evals).calls
        return [text.split()[1] for text in calls if text.startswith("evaluate")]

    assert evaluated_steps(every=3) == ["0", "3", "6", "7"]
    assert evaluated_steps(every=2, start_step=4) == ["4", "6", "7"]
    assert evaluated_steps(every=0) == ["0", "7"]


def test_demonstrations_send_weights_before_evaluations_only(tmp_path: Path) -> None:
    parts = lead(
        ScriptedParts(),
        tmp_path,
        steps=4,
        evals={"every": 2, "start_step": 1},
        environment="demonstration",
    )
    syncs = [text for text in parts.calls if text.startswith(("sync", "evaluate"))]
    assert syncs == [
        "sync 0",
        "sync 1",
        "evaluate 2 at version 1",
        "sync 2",
        "evaluate 4 at version 2",
    ]


def test_run_stops_when_the_mean_accuracy_reaches_stop_at(tmp_path: Path) -> None:
    evals = {"every": 1, "stop_at": 0.5}
    parts = lead(
        ScriptedParts(accuracies=[0.1, 0.6, 0.3, 0.8, 0.9]), tmp_path, steps=9, evals=evals
    )
    assert [text for text in parts.calls if text.startswith("train")] == [
        "train 1",
        "train 2",
        "train 3",
    ]
    assert parts.calls[-3:] == ["save step-3", "finish", "stop"]


def test_the_mean_of_the_last_evaluations_ends_a_run() -> None:
    settings = EvalSettings(stop_at=0.5)
    assert not is_accuracy_reached([], settings)
    assert not is_accuracy_reached([0.9], settings)
    assert is_accuracy_reached([0.4, 0.6], settings)
    assert is_accuracy_reached([0.0, 0.4, 0.6], settings)
    assert not is_accuracy_reached([0.9, 0.9, 0.4, 0.4], settings)
    assert not is_accuracy_reached([0.9, 0.9], EvalSettings(stop_at=None))


def test_warning_when_stop_at_was_not_reached(tmp_path: Path) -> None:
    evals = {"every": 1, "stop_at": 0.5}
    screen = io.StringIO()
    lead(ScriptedParts(accuracies=[0.1, 0.2, 0.6]), tmp_path, evals=evals, stream=screen)
    last = screen.getvalue().splitlines()[-1]
    assert "warning: eval.stop_at=0.5 was not reached in 2 steps" in last
    assert "the last 2 evaluation(s) average 0.400" in last
    screen = io.StringIO()
    lead(ScriptedParts(accuracies=[0.1, 0.2, 0.9]), tmp_path, evals=evals, stream=screen)
    assert "eval.stop_at" not in screen.getvalue()


def test_stop_at_is_refused_when_rewards_have_no_correctness(tmp_path: Path) -> None:
    evals = {"every": 1, "stop_at": 0.5}
    parts = ScriptedParts(accuracies=[None])
    with fails(ExitCode.REFUSED, match=r"eval\.stop_at=0\.5: .* no correctness"):
        lead(parts, tmp_path, evals=evals)
    assert not any(call.startswith("train") for call in parts.calls)
    parts = lead(ScriptedParts(accuracies=[None, None, None]), tmp_path, evals={"every": 1})
    assert "eval/accuracy" not in parts.metrics[2]


def test_evaluation_line_counts_lost_responses(tmp_path: Path) -> None:
    screen = io.StringIO()
    lead(ScriptedParts(num_lost=3), tmp_path, stream=screen)
    assert (
        "step 0: held-out accuracy 0.500 ± 0.100 (2 questions x 4, 50.0% parseable, 3 lost)"
        in screen.getvalue()
    )
    screen = io.StringIO()
    lead(ScriptedParts(), tmp_path, stream=screen)
    assert "lost" not in screen.getvalue()


def test_audit_obstacle_is_logged_once(tmp_path: Path) -> None:
    parts = ScriptedParts()
    screen = io.StringIO()
    parts.audit_obstacle = "this SGLang has no checksums"
    lead(parts, tmp_path, stream=screen)
    assert (
        screen.getvalue().count("weights are not audited by value: this SGLang has no checksums")
        == 1
    )


def test_consecutive_nonfinite_steps_end_the_run_and_are_recorded(tmp_path: Path) -> None:
    parts = ScriptedParts(finite=[False, True, False, False, False])
    with pytest.raises(StoppedByGuard, match=r"3 consecutive steps .*guard\.nonfinite=skip"):
        lead(parts, tmp_path, steps=9)
    assert [text for text in parts.calls if text.startswith("train")] == [
        "train 1",
        "train 2",
        "train 3",
        "train 4",
        "train 5",
    ]
    assert [parts.metrics[step]["train/nonfinite"] for step in range(1, 6)] == [1, 0, 1, 1, 1]


def test_step_without_rollouts_counts_as_neither_finite_nor_nonfinite(tmp_path: Path) -> None:
    parts = ScriptedParts(finite=[True] * 3, groups=[group(1.0, 1.0, name="uniform")])
    lead(parts, tmp_path, steps=3)
    assert parts.metrics[1]["train/optimizer_steps"] == 0
    assert parts.metrics[1]["rollout/zero_variance_rate"] == 1.0
    assert parts.metrics[1]["rollout/wasted_token_fraction"] == 1.0


def test_trained_tokens_are_not_wasted(tmp_path: Path) -> None:
    parts = lead(ScriptedParts(), tmp_path)  # two rollouts of four trained tokens, eight generated
    assert parts.metrics[1]["rollout/wasted_token_fraction"] == 0.0
    assert parts.metrics[1]["train/samples"] == 2


def test_run_that_trains_nothing_warns_in_every_step_and_at_the_end(
    tmp_path: Path,
) -> None:
    screen = io.StringIO()
    lead(ScriptedParts(groups=[group(0.0, 0.0, name="uniform")]), tmp_path, steps=4, stream=screen)
    lines = screen.getvalue().splitlines()
    steps = [
        line
        for line in lines
        if "| nothing trained: all 1 groups have zero variance (1 all incorrect) |" in line
    ]
    assert len(steps) == 4 and not any("nan" in line for line in lines)
    after_third = lines[lines.index(steps[2]) + 1]
    assert "warning: 3 consecutive steps trained nothing: every answer is incorrect" in after_third
    assert "4 of 4 steps trained nothing: every answer is incorrect" in lines[-1]


def test_run_that_trains_does_not_warn(tmp_path: Path) -> None:
    screen = io.StringIO()
    lead(ScriptedParts(), tmp_path, steps=4, stream=screen)
    assert "trained nothing" not in screen.getvalue() and "warning" not in screen.getvalue()


def test_every_token_is_accounted_in_one_class(tmp_path: Path) -> None:
    parts = ScriptedParts(finite=[True, False])
    screen = io.StringIO()
    lead(parts, tmp_path, stream=screen)
    accounts = [
        {n: v for n, v in parts.metrics[step].items() if n.startswith("account/") and v}
        for step in (0, 1, 2)
    ]
    assert accounts == [
        {"account/evaluation": 5, "account/generated": 5},
        {"account/trained/mixed": 8, "account/generated": 8},
        {"account/not_applied": 8, "account/evaluation": 5, "account/generated": 13},
    ]
    assert [parts.metrics[step]["account/unaccounted"] for step in (1, 2)] == [0, 0]
    assert "| tokens: 100% mixed |" in screen.getvalue() and "unaccounted" not in screen.getvalue()


def test_unbalanced_account_warns_and_the_run_continues(tmp_path: Path) -> None:
    screen = io.StringIO()
    parts = lead(
        ScriptedParts(groups=[group(1.0, 0.0, num_generated=[4, 5])]), tmp_path, stream=screen
    )  # the engines said 8
    assert parts.metrics[1]["account/unaccounted"] == -1
    assert (
        screen.getvalue().count(
            "warning: 1 of 8 generated tokens are counted twice (account/unaccounted)"
        )
        == 2
    )
    assert parts.calls[-1] == "stop"


def test_tokens_that_only_the_engines_counted_are_unaccounted(tmp_path: Path) -> None:
    """In step 1 a request was lost. Step 2 has an evaluation, too: 8 and 5 tokens are counted."""
    parts = ScriptedParts()
    parts.comparisons = [
        TokenComparison(5, 0),
        TokenComparison(24, 16),
        TokenComparison(8, 0),
        TokenComparison(5, 0),
    ]
    screen = io.StringIO()
    lead(parts, tmp_path, stream=screen)
    assert parts.counted_tokens == [5, 8, 8, 5]
    counts = [
        (parts.metrics[step]["account/engine_tokens"], parts.metrics[step]["account/unaccounted"])
        for step in (0, 1, 2)
    ]
    assert counts == [(5, 0), (24, 16), (13, 0)]
    warnings = [line for line in screen.getvalue().splitlines() if "warning" in line]
    (warning,) = warnings
    assert "16 of 24 tokens that the engines sampled are in no class" in warning


def test_zero_variance_groups_train_beside_mixed_ones_with_zvp(tmp_path: Path) -> None:
    groups = [group(1.0, 0.0, name="m"), group(1.0, 1.0, name="f")]
    assert (
        lead(ScriptedParts(groups=groups), tmp_path).metrics[1]["train/zero_variance_samples"] == 0
    )
    zvp = lead(ScriptedParts(groups=groups), tmp_path, credit=CreditSettings(all_correct="zvp"))
    assert zvp.metrics[1]["train/zero_variance_samples"] == 2
    assert zvp.metrics[1]["account/trained/zero_variance"] == 8


def test_a_step_that_fails_before_it_has_metrics_leaves_no_record(tmp_path: Path) -> None:
    def fail(step: int) -> None:
        if step == 2:
            raise Failure("no engine answers", ExitCode.ENGINE_FAILED)

    parts = ScriptedParts(on_sample=fail)
    with fails(ExitCode.ENGINE_FAILED):
        lead(parts, tmp_path, steps=3)
    assert list(parts.metrics) == [0, 1]


def test_a_step_that_fails_after_its_update_leaves_its_record(tmp_path: Path) -> None:
    parts = ScriptedParts(finite=[True, False, False, False])
    with pytest.raises(StoppedByGuard):
        lead(parts, tmp_path, steps=5)
    assert list(parts.metrics) == [0, 1, 2, 3, 4]


def test_a_run_without_any_update_fails(tmp_path: Path) -> None:
    parts = ScriptedParts(finite=[False, False])
    with pytest.raises(StoppedByGuard, match="every update had NaN or Inf"):
        lead(parts, tmp_path, steps=2)


def test_a_failed_last_evaluation_keeps_the_trained_weights(tmp_path: Path) -> None:
    parts = ScriptedParts()

    def fail(label: str) -> None:
        if label == "2":
            raise Failure("too many responses are lost", ExitCode.ENGINE_FAILED)

    parts.on_measure = fail
    with fails(ExitCode.ENGINE_FAILED):
        lead(parts, tmp_path, steps=2)
    assert "save step-2" in parts.calls


def test_all_delivered_groups_are_released(tmp_path: Path) -> None:
    """Also those that were stopped or are surplus, which do not train."""

    class Parts(ScriptedParts):
        def sample(self, step: int) -> RolloutBatch:
            return dataclasses.replace(super().sample(step), delivered_ids=("g", "surplus"))

    parts = lead(Parts(), tmp_path, steps=1)
    assert parts.released_groups == ["g", "surplus"]


def test_a_resumed_run_may_end_without_an_update(tmp_path: Path) -> None:
    """An earlier process may have updated the weights."""
    cursor = PromptCursor(epoch=0, position=1, digest="d")
    state = make_state(1, selection=SelectorState(prompts=cursor)).position
    parts = ScriptedParts(finite=[False])
    lead(parts, tmp_path, steps=2, resume_state=state)
    assert "save step-2" in parts.calls


def test_samples_are_kept_on_due_steps_before_rollouts_are_released(tmp_path: Path) -> None:
    class Parts(ScriptedParts):
        def run(self, command: Command) -> Any:
            if isinstance(command, Train):
                self.calls.append(f"values {command.keep_values}")
            return super().run(command)

    class Keeper(Observer):
        def prepare(self, command: Train) -> Train:
            return msgspec.structs.replace(command, keep_values=command.plan.step == 2)

        def after_train(self, trained_step: TrainedStep, values: dict[str, float]) -> None:
            if trained_step.plan.step == 2:
                parts.calls.append(f"keep after {len(parts.released_groups)} releases")
                values["samples/kept"] = 3.0

    parts = Parts()
    lead(parts, tmp_path, steps=3, observers=[Keeper()])
    calls = [text for text in parts.calls if text.startswith(("train", "values", "keep"))]
    assert calls == [
        "values False",
        "train 1",
        "values True",
        "train 2",
        "keep after 1 releases",
        "values False",
        "train 3",
    ]
    names = {"samples/kept"}
    assert [names & parts.metrics[step].keys() for step in (1, 2, 3)] == [set(), names, set()]


def make_set(parts: ScriptedParts, every: int) -> Any:
    """A set of one question with one correct response, which notes its calls."""

    def sample(label: str) -> list[Any]:
        parts.calls.append(f"evaluate {label} at version {parts.version}")
        return [group(1.0, name="q")]

    return SimpleNamespace(settings=EvalSettings(every=every, samples_per_prompt=1), sample=sample)


def test_every_set_is_evaluated_at_its_own_interval(tmp_path: Path) -> None:
    """At the start, at its interval, and at the end, with the weights of that step."""
    parts = ScriptedParts()
    sets = {"often": make_set(parts, 2), "seldom": make_set(parts, 3), "never": make_set(parts, 0)}
    lead(parts, tmp_path, steps=7, evals={"every": 4}, sets=sets)
    calls = [call for call in parts.calls if call.startswith("evaluate")]
    expected_labels = {
        0: ["0", "0-often", "0-seldom", "0-never"],
        2: ["2-often"],
        3: ["3-seldom"],
        4: ["4", "4-often"],
        6: ["6-often", "6-seldom"],
        7: ["7", "7-often", "7-seldom", "7-never"],
    }
    assert calls == [
        f"evaluate {label} at version {step}"
        for step, labels in expected_labels.items()
        for label in labels
    ]
    assert parts.metrics[2]["eval/often/accuracy"] == 1.0
    assert "eval/accuracy" not in parts.metrics[2]
    assert parts.metrics[4]["eval/accuracy"] == 0.5
    assert "eval/seldom/accuracy" not in parts.metrics[4]
    tokens = parts.metrics[4]["account/evaluation"]
    assert tokens > parts.metrics[2]["account/evaluation"] > 0, "both count"


@pytest.mark.parametrize("environment", ["single_turn", "demonstration"])
def test_all_evaluations_of_a_step_follow_one_sync_and_no_other_comes_between(
    tmp_path: Path, environment: str
) -> None:
    """A sync between two sets would compare different weights under one step."""
    parts = ScriptedParts()
    sets = {"a": make_set(parts, 1), "b": make_set(parts, 1)}
    lead(parts, tmp_path, steps=3, evals={"every": 1}, environment=environment, sets=sets)
    calls = [call for call in parts.calls if call.startswith(("evaluate", "sync", "train"))]
    for step in range(4):
        first = calls.index(f"evaluate {step} at version {step}")
        assert calls[first - 1] == f"sync {step}"
        labels = [str(step), f"{step}-a", f"{step}-b"]
        assert calls[first : first + 3] == [f"evaluate {x} at version {step}" for x in labels]
        assert calls[first + 3 : first + 4] in ([f"train {step + 1}"], [])


def test_rollouts_that_are_gone_are_sampled_again_and_the_step_trains_once(tmp_path: Path) -> None:
    """Their collector ended between the batch and the update."""
    parts = ScriptedParts(lost_rollouts=[("r1", "r2"), ("r3",)])
    lead(parts, tmp_path, steps=2)
    step_1 = parts.calls[parts.calls.index("sample step-1") : parts.calls.index("sample step-2")]
    assert [call for call in step_1 if "evaluate" not in call] == [
        "sample step-1",
        "train 1",
        "sample again r1,r2",
        "train 1",
        "sample again r3",
        "train 1",
        "sync 1",
    ]
    assert parts.metrics[1]["rollout/repeated"] == 3.0
    assert parts.metrics[2]["rollout/repeated"] == 0.0
    assert parts.released_groups == ["g", "g"]


COLOCATED = EngineSettings(colocated=True)


def test_colocated_engines_sleep_after_the_rollouts_of_a_step_and_wake_with_its_sync(
    tmp_path: Path,
) -> None:
    """Evaluations come while they are awake."""
    parts = ScriptedParts()
    lead(parts, tmp_path, steps=2, evals={"every": 1}, engine=COLOCATED)
    step_1 = [
        "sample step-1",
        "sleep",
        "train 1",
        "sync 1",
        "evaluate 1 at version 1",
    ]
    start = parts.calls.index("sample step-1")
    assert parts.calls[start : start + 6] == [*step_1, "sample step-2"]
    assert parts.calls[:start].count("sleep") == 0
    assert parts.num_refreshes == 5, "one before each sync, one before an engine that ended sleeps"


def test_colocated_engines_get_the_weights_again_to_replace_rollouts_that_are_gone(
    tmp_path: Path,
) -> None:
    parts = ScriptedParts(lost_rollouts=[("r1", "r2")])
    lead(parts, tmp_path, steps=1, engine=COLOCATED)
    start = parts.calls.index("sample step-1")
    assert parts.calls[start : start + 8] == [
        "sample step-1",
        "sleep",
        "train 1",
        "sync 1",
        "sample again r1,r2",
        "sleep",
        "train 1",
        "sync 2",
    ]


def test_engines_do_not_hold_the_trainers_weights_between_an_update_and_its_sync(
    tmp_path: Path,
) -> None:
    """No engine may join meanwhile."""
    is_current: list[bool] = []
    parts = ScriptedParts(on_sample=lambda step: is_current.append(parts.is_current))
    lead(parts, tmp_path, steps=3, environment="demonstration", evals={"every": 2, "start_step": 1})
    assert is_current == [True, False, True]
