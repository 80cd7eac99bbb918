"""The order of a run's verbs: when it evaluates, syncs and stops. Stand-ins say when they are
called.
"""

import io
from typing import Any

import pytest

from megatron_rl.config.schema import CreditSettings
from megatron_rl.run.leader import NonFiniteRun
from tests.support.groups import group
from tests.support.leaders import Stage, lead


def test_a_run_in_order(tmp_path: Any) -> None:
    stage = lead(Stage(), tmp_path)
    assert stage.said == [
        "sync 0",
        "evaluate 0 at version 0",
        "draw step-1",
        "train 1",
        "sync 1",
        "draw step-2",
        "train 2",
        "sync 2",
        "evaluate 2 at version 2",
        "save step-2",
        "finish",
        "stop",
    ]
    assert stage.released == ["g", "g"]
    assert stage.logged[1]["sync/version"] == 1 and stage.logged[2]["eval/accuracy"] == 0.5


def test_evaluations_come_at_their_interval_and_never_before_the_first(tmp_path: Any) -> None:
    def evaluated(**evals: int) -> list[str]:
        said = lead(Stage(), tmp_path, steps=7, evals=evals).said
        return [text.split()[1] for text in said if text.startswith("evaluate")]

    assert evaluated(every=3) == ["0", "3", "6", "7"]
    assert evaluated(every=2, first=4) == ["4", "6", "7"]
    assert evaluated(every=0) == ["0", "7"]


def test_weights_that_no_rollout_needs_are_sent_before_evaluations_only(tmp_path: Any) -> None:
    stage = lead(Stage(), tmp_path, steps=4, evals={"every": 2, "first": 1}, when="evaluation")
    syncs = [text for text in stage.said if text.startswith(("sync", "evaluate"))]
    assert syncs == [
        "sync 0",
        "sync 1",
        "evaluate 2 at version 1",
        "sync 2",
        "evaluate 4 at version 2",
    ]


def test_the_run_stops_where_the_mean_of_the_last_evaluations_is_reached(tmp_path: Any) -> None:
    evals = {"every": 1, "stop_at": 0.5, "stop_average": 2}
    stage = lead(Stage(accuracies=[0.1, 0.6, 0.3, 0.8, 0.9]), tmp_path, steps=9, evals=evals)
    assert [text for text in stage.said if text.startswith("train")] == [
        "train 1",
        "train 2",
        "train 3",
    ]
    assert stage.said[-3:] == ["save step-3", "finish", "stop"]


def test_a_run_says_at_its_end_that_it_missed_what_it_was_to_reach(tmp_path: Any) -> None:
    evals = {"every": 1, "stop_at": 0.5, "stop_average": 2}
    said = io.StringIO()
    lead(Stage(accuracies=[0.1, 0.2, 0.6]), tmp_path, evals=evals, stream=said)
    last = said.getvalue().splitlines()[-1]
    assert (
        "warning: eval.stop_at=0.5 was not reached in 2 steps; the last 2 evaluation(s) average 0.400"
        in last
    )
    said = io.StringIO()
    lead(Stage(accuracies=[0.1, 0.2, 0.9]), tmp_path, evals=evals, stream=said)
    assert "eval.stop_at" not in said.getvalue()


def test_an_evaluation_says_how_many_responses_were_lost(tmp_path: Any) -> None:
    said = io.StringIO()
    lead(Stage(lost=3), tmp_path, stream=said)
    assert (
        "step 0: held-out accuracy 0.500 ± 0.100 (2 questions x 4, 50.0% parseable, 3 lost)"
        in said.getvalue()
    )
    said = io.StringIO()
    lead(Stage(), tmp_path, stream=said)
    assert "lost" not in said.getvalue()


def test_weights_that_no_engine_can_show_are_said_to_be_unaudited_once(tmp_path: Any) -> None:
    stage, said = Stage(), io.StringIO()
    stage.audit_obstacle = "this SGLang has no checksums"
    lead(stage, tmp_path, stream=said)
    assert (
        said.getvalue().count("weights are not audited by value: this SGLang has no checksums") == 1
    )


def test_non_finite_steps_in_a_row_end_the_run_and_are_recorded(tmp_path: Any) -> None:
    stage = Stage(finite=[False, True, False, False])
    with pytest.raises(NonFiniteRun, match=r"2 steps in a row .*train\.max_nonfinite_steps=2"):
        lead(stage, tmp_path, steps=9, max_nonfinite_steps=2)
    assert [text for text in stage.said if text.startswith("train")] == [
        "train 1",
        "train 2",
        "train 3",
        "train 4",
    ]
    assert [stage.logged[step]["train/nonfinite"] for step in (1, 2, 3, 4)] == [1, 0, 1, 1]


def test_a_step_without_rollouts_neither_counts_as_finite_nor_as_broken(tmp_path: Any) -> None:
    flat = Stage(finite=[True] * 3, groups=[group(1.0, 1.0, name="flat")])
    lead(flat, tmp_path, steps=3)
    assert flat.logged[1]["train/optimizer_steps"] == 0
    assert flat.logged[1]["rollout/zero_variance_rate"] == 1.0
    assert flat.logged[1]["rollout/wasted_token_fraction"] == 1.0


def test_tokens_that_trained_are_not_wasted(tmp_path: Any) -> None:
    stage = lead(Stage(), tmp_path)  # two rollouts of four trained tokens, eight generated
    assert stage.logged[1]["rollout/wasted_token_fraction"] == 0.0
    assert stage.logged[1]["train/samples"] == 2


def test_a_run_that_learns_nothing_says_so_in_every_step_while_it_lasts_and_at_the_end(
    tmp_path: Any,
) -> None:
    said = io.StringIO()
    lead(Stage(groups=[group(0.0, 0.0, name="flat")]), tmp_path, steps=4, stream=said)
    lines = said.getvalue().splitlines()
    steps = [line for line in lines if "| nothing trained: all 1 groups flat (1 wrong) |" in line]
    assert len(steps) == 4 and not any("nan" in line for line in lines)
    after_third = lines[lines.index(steps[2]) + 1]
    assert "warning: 3 steps in a row trained nothing; every answer is wrong" in after_third
    assert "4 of 4 steps trained nothing: every answer is wrong" in lines[-1]


def test_a_run_that_learns_has_nothing_to_add(tmp_path: Any) -> None:
    said = io.StringIO()
    lead(Stage(), tmp_path, steps=4, stream=said)
    assert "trained nothing" not in said.getvalue() and "warning" not in said.getvalue()


def test_every_token_of_a_step_and_its_evaluation_is_in_one_class(tmp_path: Any) -> None:
    stage, said = Stage(finite=[True, False]), io.StringIO()
    lead(stage, tmp_path, stream=said)
    accounts = [
        {n: v for n, v in stage.logged[step].items() if n.startswith("account/") and v}
        for step in (0, 1, 2)
    ]
    assert accounts == [
        {"account/evaluation": 5, "account/generated": 5},
        {"account/trained/mixed": 8, "account/generated": 8},
        {"account/not_applied": 8, "account/evaluation": 5, "account/generated": 13},
    ]
    assert [stage.logged[step]["account/unaccounted"] for step in (1, 2)] == [0, 0]
    assert "| tokens: 100% mixed |" in said.getvalue() and "unaccounted" not in said.getvalue()


def test_an_account_that_does_not_add_up_is_said_and_the_run_goes_on(tmp_path: Any) -> None:
    said = io.StringIO()
    stage = lead(
        Stage(groups=[group(1.0, 0.0, num_generated=[4, 5])]), tmp_path, stream=said
    )  # the engines said 8
    assert stage.logged[1]["account/unaccounted"] == -1
    assert (
        said.getvalue().count(
            "warning: 1 of 8 generated tokens are counted twice (account/unaccounted)"
        )
        == 2
    )
    assert stage.said[-1] == "stop"


def test_flat_groups_are_planned_beside_mixed_ones_when_asked_for(tmp_path: Any) -> None:
    groups = [group(1.0, 0.0, name="m"), group(1.0, 1.0, name="f")]
    assert lead(Stage(groups=groups), tmp_path).logged[1]["train/zero_variance_samples"] == 0
    zvp = lead(Stage(groups=groups), tmp_path, credit=CreditSettings(all_correct="zvp"))
    assert zvp.logged[1]["train/zero_variance_samples"] == 2
    assert zvp.logged[1]["account/trained/flat"] == 8
