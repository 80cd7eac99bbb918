"""The lines at the end of a run."""

import json
from pathlib import Path

import pytest

from megatron_rl.records.past_run import Record
from megatron_rl.records.run_summary import (
    EvaluatedStep,
    closing_lines,
    describe_seconds,
    summarize,
)


def record(step: int, accuracy: float | None = None, **values: float) -> Record:
    metrics: Record = {"step": float(step), **values}
    if accuracy is not None:
        metrics |= {"eval/accuracy": accuracy, "eval/accuracy_ci95": 0.05}
    return metrics


def test_accuracy_is_given_from_start_to_end_with_the_best_step() -> None:
    records = [record(0, 0.25), record(1), record(2, 0.75), record(3, 0.75), record(4, 0.5)]
    summary = summarize(records)
    assert summary.best == EvaluatedStep(2, 0.75, 0.05), "the first of equal ones"
    assert summary.lines() == [
        "held-out accuracy 0.250 ± 0.050 (step 0) → 0.500 ± 0.050 (step 4), 95 % intervals; "
        "best 0.750 ± 0.050 (step 2)"
    ]


def test_the_last_step_is_not_named_twice_when_it_is_the_best() -> None:
    assert "best" not in summarize([record(0, 0.25), record(2, 0.75)]).lines()[0]


def test_a_single_evaluation_has_no_arrow() -> None:
    assert summarize([record(0, 0.25)]).lines() == ["held-out accuracy 0.250 ± 0.050 (step 0)"]


def test_tokens_and_seconds_are_summed_and_the_last_record_of_a_step_counts() -> None:
    times = {"time/step": 30.0, "time/eval": 2.0, "time/checkpoint": 1.0}
    records = [
        record(0, **{"account/generated": 900.0, "account/evaluation": 900.0, "time/eval": 2.0}),
        record(1, **{"account/generated": 999.0}, **times),
        record(1, **{"account/generated": 2000.0, "account/evaluation": 100.0}, **times),
        record(2, **{"account/generated": 3000.0, "account/demonstrated": 7.0}, **times),
    ]
    summary = summarize(records)
    assert (summary.num_steps, summary.tokens, summary.seconds) == (2, 4900, 68.0)
    assert summary.lines() == [
        "4,900 tokens sampled and 7 tokens of demonstrations in 2 steps and 1 min 8 s; "
        "evaluations sampled 1,000 tokens"
    ]


def test_missing_and_nonfinite_metrics_leave_lines_out() -> None:
    assert summarize([]).lines() == []
    assert (
        summarize([{"step": 1.0, "eval/accuracy": None, "account/generated": None}]).lines() == []
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (725.0, "12 min 5 s"), (12_000.0, "3 h 20 min")],
)
def test_times_are_written_for_people(seconds: float, text: str) -> None:
    assert describe_seconds(seconds) == text


def test_closing_lines_name_the_last_weights_and_the_next_command(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        (tmp_path / f"checkpoints/step-{step}").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "eval/accuracy": 0.5}) + "\n")
    accuracy, place, command = closing_lines(tmp_path)
    assert accuracy == "held-out accuracy 0.500 ± 0.000 (step 0)"
    assert place == (
        f"done: metrics, logs and checkpoints are in {tmp_path}; "
        f"the weights are in {tmp_path}/checkpoints/step-10"
    )
    assert command == f"next: python launch/report.py {tmp_path}"


def test_damaged_metrics_cost_only_their_lines(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{damaged\n")
    assert closing_lines(tmp_path) == [
        f"done: metrics, logs and checkpoints are in {tmp_path}",
        f"next: python launch/report.py {tmp_path}",
    ]


def test_the_time_of_evaluation_sets_counts() -> None:
    times = {"time/step": 30.0, "time/eval": 2.0, "time/eval/hard": 5.0}
    assert summarize([record(1, **times)]).seconds == 37.0
