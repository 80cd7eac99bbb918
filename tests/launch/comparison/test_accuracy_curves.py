"""What complete runs learnt is read from their directories and put side by side."""

import json
from pathlib import Path

import pytest

from launch.comparison.accuracy_curves import plot, read_curve, table
from megatron_rl.records.past_run import RunUnreadable
from tests.support.past_runs import write_run


def test_accuracy_over_rollout_tokens(tmp_path: Path) -> None:
    run = write_run([f"run.root={tmp_path}", "run.name=a"], accuracies=(0.25, 0.5, 0.75))
    curve = read_curve(run, seed=3)
    assert curve.points == [(0.0, 0.25), (1000.0, 0.5), (2000.0, 0.75)]
    assert (curve.seed, curve.gain, curve.half_width, curve.parseable, curve.seconds) == (
        3,
        0.5,
        0.125,
        1.0,
        16.0,
    )


def test_steps_without_an_evaluation_count_and_a_null_is_none(tmp_path: Path) -> None:
    records = [
        {"step": 0, "eval/accuracy": 0.25, "eval/accuracy_ci95": 0.1, "eval/parseable": 0.5},
        {"step": 1, "rollout/tokens": 10.0, "eval/accuracy": None},
        {
            "step": 2,
            "rollout/tokens": 10.0,
            "eval/accuracy": 1.0,
            "eval/accuracy_ci95": 0.2,
            "eval/parseable": 1.0,
        },
        {"step": 3},
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    curve = read_curve(tmp_path, seed=0)
    assert (curve.points, curve.half_width, curve.parseable) == (
        [(0.0, 0.25), (20.0, 1.0)],
        0.2,
        0.5,
    )


def test_a_run_without_evaluations_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rollout/tokens": 5}\n')
    with pytest.raises(RunUnreadable, match="holds no evaluation"):
        read_curve(tmp_path, seed=0)


def test_the_table_has_each_run_and_the_mean_of_a_variant(tmp_path: Path) -> None:
    runs = [
        write_run([f"run.root={tmp_path}", f"run.name={i}"], accuracies=(0.25, 0.5 + i / 8))
        for i in range(2)
    ]
    curves = [read_curve(run, seed) for seed, run in enumerate(runs)]
    assert list(table({"espo": curves}))[2:] == [
        "| espo | 0 | 0.250 | 0.500 ± 0.125 | +25.0 | 1,000 | 9 |",
        "| espo | 1 | 0.250 | 0.625 ± 0.125 | +37.5 | 1,000 | 9 |",
        "| **espo** | mean | | | **+31.2** (+25.0 to +37.5) | | |",
    ]
    short = read_curve(write_run([f"run.root={tmp_path}", "run.name=s"], accuracies=(0.5,)), 2)
    plot({"espo": [*curves, short]}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_clipped_tokens_of_both_sides_are_averaged_over_the_steps_that_train(
    tmp_path: Path,
) -> None:
    run = write_run(
        [f"run.root={tmp_path}", "run.name=a"], accuracies=(0.25, 0.5, 0.75), clipped=0.25
    )
    assert read_curve(run, seed=0).clipped == 0.25
    assert (
        read_curve(
            write_run([f"run.root={tmp_path}", "run.name=b"], accuracies=(0.25,)), seed=0
        ).clipped
        == 0
    )
