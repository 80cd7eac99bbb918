"""Accuracy of complete runs is read from their directories and reported together."""

import json
from pathlib import Path

import pytest

from megatron_rl.records.past_run import RunUnreadable
from tests.lab.comparison.accuracy_curves import plot, read_curve, table
from tests.support.past_runs import write_run


def write(tmp_path: Path, name: str, *accuracies: float, clipped_share: float = 0.0) -> Path:
    overrides = [f"run.root={tmp_path}", f"run.name={name}"]
    return write_run(overrides, accuracies=accuracies, clipped_share=clipped_share)


def test_accuracy_over_rollout_tokens(tmp_path: Path) -> None:
    curve = read_curve(write(tmp_path, "a", 0.25, 0.5, 0.75), seed=3)
    assert curve.points == [(0.0, 0.25), (1000.0, 0.5), (2000.0, 0.75)]
    assert (curve.seed, curve.gain, curve.half_width) == (3, 0.5, 0.125)
    assert (curve.parseable, curve.seconds) == (1.0, 16.0)
    assert curve.times == [2.0, 9.0, 16.0]


def test_tokens_of_steps_without_an_evaluation_count(tmp_path: Path) -> None:
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
    lines = [json.dumps(record) + "\n" for record in records]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    curve = read_curve(tmp_path, seed=0)
    assert curve.points == [(0.0, 0.25), (20.0, 1.0)]
    assert (curve.half_width, curve.parseable) == (0.2, 0.5)


def test_a_run_without_evaluations_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rollout/tokens": 5}\n')
    with pytest.raises(RunUnreadable, match="holds no evaluation"):
        read_curve(tmp_path, seed=0)


@pytest.mark.slow
def test_the_table_has_each_run_and_the_mean_of_a_variant(tmp_path: Path) -> None:
    runs = [write(tmp_path, str(i), 0.25, 0.5 + i / 8) for i in range(2)]
    curves = [read_curve(run, seed) for seed, run in enumerate(runs)]
    assert list(table({"espo": curves}))[2:] == [
        "| espo | 0 | 0.250 | 0.500 ± 0.125 | +25.0 | 1,000 | 9 |",
        "| espo | 1 | 0.250 | 0.625 ± 0.125 | +37.5 | 1,000 | 9 |",
        "| **espo** | mean | | | **+31.2** (+25.0 to +37.5) | | |",
    ]
    assert list(table({"espo": curves[:1]}))[-1] == "| **espo** | mean | | | **+25.0** | | |"
    short = read_curve(write(tmp_path, "short", 0.5), 2)
    plot({"espo": [*curves, short]}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_clipped_share_is_the_mean_over_steps_of_both_sides(tmp_path: Path) -> None:
    run = write(tmp_path, "a", 0.25, 0.5, 0.75, clipped_share=0.25)
    assert read_curve(run, seed=0).clipped_share == 0.25
    start_only = write(tmp_path, "b", 0.25)
    assert read_curve(start_only, seed=0).clipped_share == 0
