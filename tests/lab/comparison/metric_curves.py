"""Metrics of complete runs over the steps, as a table and as a plot below held-out accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from statistics import mean

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.records.past_run import Record, read_metrics
from tests.lab.comparison.accuracy_curves import with_range
from tests.lab.comparison.figure import draw_range, drawing

ACCURACY = "eval/accuracy"


class MetricRefused(Failure):
    """A variant has no value of the metric in some of its runs, or no variant has any."""

    exit_code = ExitCode.REFUSED


@dataclass(frozen=True)
class MetricCurves:
    """Metrics of one run.

    values: the values of each metric as (step, value), none if the run has no such metric.
    """

    directory: Path
    seed: int
    values: Mapping[str, Sequence[tuple[int, float]]]


def read_metric_curves(directory: Path, seed: int, metrics: Sequence[str]) -> MetricCurves:
    """Read metrics and held-out accuracy of a run. Raises `RunUnreadable`."""
    records = read_metrics(directory)
    names = (ACCURACY, *metrics)
    return MetricCurves(directory, seed, {name: _metric_curve(records, name) for name in names})


def _metric_curve(records: Sequence[Record], name: str) -> list[tuple[int, float]]:
    points = []
    for record in records:
        value = record.get(name)
        if value is not None:
            points.append((int(record["step"] or 0), value))
    return points


def require_metrics(results: Mapping[str, Sequence[MetricCurves]]) -> None:
    """Raise `MetricRefused` if no variant has a metric, or only some runs of a variant have it."""
    for name in _names(results):
        variants = [runs for runs in results.values() if any(run.values[name] for run in runs)]
        # Which runs to blame, and to look for similar names in
        candidates = variants or list(results.values())
        for run in (run for runs in candidates for run in runs):
            if not run.values[name]:
                raise MetricRefused(
                    f"--metric {name}: the run {run.directory} has no value of this metric. "
                    f"{_suggestion(name, run.directory)}"
                )


def _names(results: Mapping[str, Sequence[MetricCurves]]) -> list[str]:
    return list(next(iter(results.values()))[0].values)


def _suggestion(name: str, directory: Path) -> str:
    names = sorted({key for record in read_metrics(directory) for key in record})
    close = get_close_matches(name, names, n=3)
    if close:
        return f"Similar names are {', '.join(close)}"
    return f"{directory / 'metrics.jsonl'} has all names"


def metric_table(results: Mapping[str, Sequence[MetricCurves]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, one for each variant.

    It has the accuracy at the end, and of each metric the mean over the steps and the largest
    value. Each cell is the mean of the runs, with their range. It is empty for a metric that the
    variant does not have.
    """
    metrics = [name for name in _names(results) if name != ACCURACY]
    columns = "".join(f" {name}, mean | largest |" for name in metrics)
    yield f"| variant | runs | held-out accuracy, end |{columns}"
    yield "|---|---|---|" + "---|---|" * len(metrics)
    for variant, runs in results.items():
        cells = [_mean_and_range([run.values[ACCURACY][-1][1] for run in runs], ".3f")]
        for name in metrics:
            values = [[value for _, value in run.values[name]] for run in runs]
            if not all(values):
                cells += ["", ""]
                continue
            cells.append(_mean_and_range(list(map(mean, values)), ".2e"))
            cells.append(_mean_and_range(list(map(max, values)), ".2e"))
        yield f"| {variant} | {len(runs)} | {' | '.join(cells)} |"


def _mean_and_range(values: Sequence[float], form: str) -> str:
    return with_range(f"{mean(values):{form}}", values, form)


def plot_metrics(results: Mapping[str, Sequence[MetricCurves]], file: Path) -> None:
    """Plot one panel for each metric over the steps, accuracy first.

    A panel shows the mean and the range of each variant's runs.
    """
    names = _names(results)
    with drawing(file, panels=len(names)) as panels:
        for axes, name in zip(panels, names, strict=True):
            for index, (variant, runs) in enumerate(results.items()):
                curves = [run.values[name] for run in runs]
                if all(curves):
                    draw_range(axes, curves, index=index, label=variant)
            if name != ACCURACY and _smallest(results, name) > 0:
                axes.set_yscale("log")
            axes.set_ylabel("held-out accuracy" if name == ACCURACY else name)
        panels[-1].set_xlabel("step")


def _smallest(results: Mapping[str, Sequence[MetricCurves]], name: str) -> float:
    curves = [run.values[name] for runs in results.values() for run in runs]
    return min(value for curve in curves for _, value in curve)
