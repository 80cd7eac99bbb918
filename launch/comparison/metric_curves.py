"""What metrics did over the steps of complete runs, as a table and as a plot below held-out
accuracy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from statistics import mean

from launch.comparison.figure import draw_range, drawing
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.records.past_run import Record, read_metrics

ACCURACY = "eval/accuracy"


class MetricRefused(Failure):
    """A metric that a run does not have."""

    exit_code = ExitCode.REFUSED


@dataclass(frozen=True)
class MetricCurves:
    """What one run's metrics did: each one's name to its values as (step, value), at least one."""

    seed: int
    values: Mapping[str, Sequence[tuple[int, float]]]


def read_metric_curves(directory: Path, seed: int, metrics: Sequence[str]) -> MetricCurves:
    """Raises `RunUnreadable` and `MetricRefused`."""
    records = read_metrics(directory)
    return MetricCurves(
        seed, {name: _metric_curve(records, name, directory) for name in (ACCURACY, *metrics)}
    )


def _metric_curve(records: Sequence[Record], name: str, directory: Path) -> list[tuple[int, float]]:
    found = [
        (int(record["step"] or 0), value)
        for record in records
        if (value := record.get(name)) is not None
    ]
    if not found:
        close = get_close_matches(name, sorted({key for record in records for key in record}), n=3)
        other = (
            f"Like it are {', '.join(close)}"
            if close
            else f"{directory / 'metrics.jsonl'} has all names"
        )
        raise MetricRefused(f"--metric {name}: the run {directory} has no value of it. {other}")
    return found


def metric_table(results: Mapping[str, Sequence[MetricCurves]]) -> Iterator[str]:
    """The lines of a Markdown table: of each variant the accuracy at its end, and of each metric
    the mean over a run's steps and its largest value; each as the mean of the runs, with their
    range."""
    metrics = [name for name in next(iter(results.values()))[0].values if name != ACCURACY]
    yield "| variant | runs | held-out accuracy, end |" + "".join(
        f" {name}, mean | largest |" for name in metrics
    )
    yield "|---|---|---|" + "---|---|" * len(metrics)
    for variant, runs in results.items():
        cells = [_spread([run.values[ACCURACY][-1][1] for run in runs], ".3f")]
        for name in metrics:
            each = [[value for _, value in run.values[name]] for run in runs]
            cells += [_spread(list(map(mean, each)), ".2e"), _spread(list(map(max, each)), ".2e")]
        yield f"| {variant} | {len(runs)} | {' | '.join(cells)} |"


def _spread(values: Sequence[float], form: str) -> str:
    return f"{mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def plot_metrics(results: Mapping[str, Sequence[MetricCurves]], file: Path) -> None:
    """One panel for each metric over the steps, accuracy first: the mean of each variant's runs,
    and their range.
    """
    names = list(next(iter(results.values()))[0].values)
    with drawing(file, panels=len(names)) as panels:
        for axes, name in zip(panels, names, strict=True):
            for index, (variant, runs) in enumerate(results.items()):
                draw_range(axes, [run.values[name] for run in runs], index=index, label=variant)
            lowest = min(
                value for runs in results.values() for run in runs for _, value in run.values[name]
            )
            if name != ACCURACY and lowest > 0:
                axes.set_yscale("log")
            axes.set_ylabel("held-out accuracy" if name == ACCURACY else name)
        panels[-1].set_xlabel("step")
