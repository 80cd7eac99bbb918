"""The order of the calls of a run: when it evaluates, syncs and stops."""

import io
from pathlib import Path

import pytest

from megatron_rl.config.schema import CreditSettings
from megatron_rl.rollouts.evaluation import EvaluationFailed
from megatron_rl.run.nonfinite_guard import NonFiniteRun
from megatron_rl.run.stopping import AccuracyUnknown
from tests.support.groups import group
from tests.support.leaders import ScriptedParts, lead


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


def test_evaluations_follow_every_and_start_step(tmp_path: Path) -> None:
    def evaluated_steps(**evals: int) -> list[str]:
        calls = lead(ScriptedParts(), tmp_path, steps=7, evals=evals).calls
        return [text.split()[1] for text in calls if text.startswith("evaluate")]

    assert evaluated_steps(every=3) == ["0", "3", "6", "7"]
    assert evaluated_steps(every=2, start_step=4) == ["4", "6", "7"]
    assert evaluated_steps(every=0) == ["0", "7"]


def test_sync_when_evaluation_sends_weights_before_evaluations_only(tmp_path: Path) -> None:
    parts = lead(
        ScriptedParts(), tmp_path, steps=4, evals={"every": 2, "start_step": 1}, when="evaluation"
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
    evals = {"every": 1, "stop_at": 0.5, "stop_average": 2}
    parts = lead(
        ScriptedParts(accuracies=[0.1, 0.6, 0.3, 0.8, 0.9]), tmp_path, steps=9, evals=evals
    )
    assert [text for text in parts.calls if text.startswith("train")] == [
        "train 1",
        "train 2",
        "train 3",
    ]
    assert parts.calls[-3:] == ["save step-3", "finish", "stop"]


def test_warning_when_stop_at_was_not_reached(tmp_path: Path) -> None:
    evals = {"every": 1, "stop_at": 0.5, "stop_average": 2}
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
    with pytest.raises(AccuracyUnknown, match=r"eval\.stop_at=0\.5: .* no correctness"):
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
    parts = ScriptedParts(finite=[False, True, False, False])
    with pytest.raises(NonFiniteRun, match=r"2 consecutive steps .*train\.max_nonfinite_steps=2"):
        lead(parts, tmp_path, steps=9, max_nonfinite_steps=2)
    assert [text for text in parts.calls if text.startswith("train")] == [
        "train 1",
        "train 2",
        "train 3",
        "train 4",
    ]
    assert [parts.metrics[step]["train/nonfinite"] for step in (1, 2, 3, 4)] == [1, 0, 1, 1]


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


def test_zero_variance_groups_train_beside_mixed_ones_with_zvp(tmp_path: Path) -> None:
    groups = [group(1.0, 0.0, name="m"), group(1.0, 1.0, name="f")]
    assert (
        lead(ScriptedParts(groups=groups), tmp_path).metrics[1]["train/zero_variance_samples"] == 0
    )
    zvp = lead(ScriptedParts(groups=groups), tmp_path, credit=CreditSettings(all_correct="zvp"))
    assert zvp.metrics[1]["train/zero_variance_samples"] == 2
    assert zvp.metrics[1]["account/trained/zero_variance"] == 8


def test_a_run_without_any_update_fails(tmp_path: Path) -> None:
    parts = ScriptedParts(finite=[False, False])
    with pytest.raises(NonFiniteRun, match="every update had NaN or Inf"):
        lead(parts, tmp_path, steps=2, max_nonfinite_steps=3)


def test_a_failed_last_evaluation_keeps_the_trained_weights(tmp_path: Path) -> None:
    parts = ScriptedParts()

    def fail(label: str) -> None:
        if label == "2":
            raise EvaluationFailed("too many responses are lost")

    parts.on_measure = fail
    with pytest.raises(EvaluationFailed):
        lead(parts, tmp_path, steps=2)
    assert "save step-2" in parts.calls
