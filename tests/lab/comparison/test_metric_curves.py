"""`tests.lab.comparison --metric` reports other metrics over the steps."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.contracts.exit_codes import ExitCode
from tests.lab.comparison.metric_curves import (
    MetricCurves,
    MetricRefused,
    metric_table,
    plot_metrics,
    require_metrics,
)
from tests.support.comparisons import Launcher, value_of

pytestmark = pytest.mark.slow

TWO = ("--seeds", "0,1", "--variant", "slow:", "algo=grpo", "--variant", "fast:", "algo=espo")


@pytest.fixture
def results(launcher: Launcher) -> Launcher:
    def outcome(overrides: Sequence[str]) -> dict[str, Any]:
        seed = int(value_of(overrides, "seed"))
        if "algo=grpo" in overrides:
            return {"accuracies": (0.2, 0.3 + 0.1 * seed), "clipped_share": 0.25}
        return {"accuracies": (0.2, 0.4, 0.8), "clipped_share": 0.5 + 0.5 * seed}

    launcher.outcome = outcome
    return launcher


def test_mean_and_range_of_each_variant_over_its_seeds(
    compare: Callable[..., int],
    results: Launcher,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert compare(*TWO, "--metric", "policy/clip_fraction_low") == ExitCode.OK
    text = (tmp_path / "out" / "metrics.md").read_text()
    assert text in capsys.readouterr().out
    slow = "1.25e-01 (1.25e-01 to 1.25e-01)"
    fast = "3.75e-01 (2.50e-01 to 5.00e-01)"
    assert text.splitlines() == [
        "| variant | runs | held-out accuracy, end | policy/clip_fraction_low, mean | largest |",
        "|---|---|---|---|---|",
        f"| slow | 2 | 0.350 (0.300 to 0.400) | {slow} | {slow} |",
        f"| fast | 2 | 0.800 (0.800 to 0.800) | {fast} | {fast} |",
    ]
    second = json.loads((tmp_path / "out" / "metrics.json").read_text())["fast"][1]
    assert second["values"]["policy/clip_fraction_low"] == [[1, 0.5], [2, 0.5]]
    assert second["values"]["eval/accuracy"] == [[0, 0.2], [1, 0.4], [2, 0.8]]
    assert (tmp_path / "out" / "metrics.png").read_bytes().startswith(b"\x89PNG")


def curves_of(values: Sequence[float], directory: Path = Path("run")) -> MetricCurves:
    """Curves of a run with a metric `x`."""
    points = [(step, value) for step, value in enumerate(values, 1)]
    return MetricCurves(directory, 0, {"eval/accuracy": [(0, 0.5)], "x": points})


def test_a_variant_without_the_metric_has_empty_cells(tmp_path: Path) -> None:
    results = {"a": [curves_of([])], "b": [curves_of([1.0, 3.0])]}
    require_metrics(results)
    without = list(metric_table(results))[-2]
    assert without == "| a | 1 | 0.500 |  |  |"
    plot_metrics(results, tmp_path / "metrics.png")
    assert (tmp_path / "metrics.png").exists()


def test_a_metric_that_only_some_runs_of_a_variant_have_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "b-seed1"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "xy": 2}\n')
    results = {"a": [curves_of([])], "b": [curves_of([1.0]), curves_of([], run)]}
    message = f"--metric x: the run {run} has no value of this metric"
    with pytest.raises(MetricRefused, match=message):
        require_metrics(results)


def test_mean_and_largest_value_are_over_the_steps() -> None:
    runs = [curves_of([1.0, 3.0])]
    *_, mean, largest = list(metric_table({"a": runs}))[-1].split(" | ")
    assert (mean, largest) == ("2.00e+00", "3.00e+00 |"), "one run has no range"


def test_a_metric_that_no_run_has_is_refused_with_similar_names(
    compare: Callable[..., int], results: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(*TWO, "--metric", "policy/clip_fraction") == ExitCode.REFUSED
    message = capsys.readouterr().err
    assert "--metric policy/clip_fraction: the run" in message
    assert "Similar names are policy/clip_fraction_" in message
