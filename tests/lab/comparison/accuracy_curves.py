"""Held-out accuracy of complete runs over rollout tokens and seconds, as a table and as a plot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from megatron_rl.records.past_run import Record, RunUnreadable, read_metrics
from tests.lab.comparison.figure import draw_range, drawing


@dataclass(frozen=True)
class Curve:
    """Accuracy of one run.

    points: each evaluation as (rollout tokens so far, accuracy).
    half_width: half the width of the last accuracy's 95 % interval.
    parseable: share of answers in the first evaluation that can be parsed.
    seconds: duration of all steps and evaluations.
    times: seconds of all steps and evaluations before the end of each one in `points`.
    clipped_share: share of the tokens whose ratio was clipped, so that they had no gradient; the
        mean over steps, 0 without any step.
    """

    seed: int
    points: list[tuple[float, float]]
    half_width: float
    parseable: float
    seconds: float
    times: list[float]
    clipped_share: float = 0.0

    @property
    def gain(self) -> float:
        """The last accuracy minus the first."""
        return self.points[-1][1] - self.points[0][1]


def read_curve(directory: Path, seed: int) -> Curve:
    """Read the evaluations of a run. Raises `RunUnreadable`."""
    records = read_metrics(directory)
    tokens = 0.0
    seconds = 0.0
    points = []
    times = []
    for record in records:
        tokens += record.get("rollout/tokens") or 0.0
        seconds += (record.get("time/step") or 0.0) + (record.get("time/eval") or 0.0)
        accuracy = record.get("eval/accuracy")
        if accuracy is not None:
            points.append((tokens, accuracy))
            times.append(seconds)
    if not points:
        raise RunUnreadable(
            f"{directory / 'metrics.jsonl'} holds no evaluation. Move that run away, or run again"
        )
    return Curve(
        seed=seed,
        points=points,
        half_width=_first(record.get("eval/accuracy_ci95") for record in reversed(records)),
        parseable=_first(record.get("eval/parseable") for record in records),
        seconds=seconds,
        times=times,
        clipped_share=mean_clipped_share(records),
    )


def mean_clipped_share(records: Iterable[Record]) -> float:
    """The share of clipped tokens: the mean over the steps that report it, or 0."""
    shares = []
    for record in records:
        low = record.get("policy/clip_fraction_low")
        high = record.get("policy/clip_fraction_high")
        if low is not None and high is not None:
            shares.append(low + high)
    return mean(shares) if shares else 0.0


def _first(values: Iterable[float | None]) -> float:
    return next((value for value in values if value is not None), float("nan"))


def table(results: Mapping[str, Sequence[Curve]]) -> Iterator[str]:
    """Yield the lines of a Markdown table: each run, and the mean of each variant."""
    yield "| variant | seed | start | end (95 % CI) | gain, points | rollout tokens | seconds |"
    yield "|---|---|---|---|---|---|---|"
    for name, curves in results.items():
        for curve in curves:
            start = curve.points[0][1]
            tokens, end = curve.points[-1]
            yield (
                f"| {name} | {curve.seed} | {start:.3f} | {end:.3f} ± {curve.half_width:.3f} "
                f"| {100 * curve.gain:+.1f} | {tokens:,.0f} | {curve.seconds:.0f} |"
            )
        gains = [100 * curve.gain for curve in curves]
        yield (
            f"| **{name}** | mean | | | "
            f"{with_range(f'**{mean(gains):+.1f}**', gains, '+.1f')} | | |"
        )


def with_range(text: str, values: Sequence[float], form: str) -> str:
    """Append the range of the values to the text of their mean. One value has no range."""
    if len(values) == 1:
        return text
    return f"{text} ({min(values):{form}} to {max(values):{form}})"


def plot(results: Mapping[str, Sequence[Curve]], file: Path) -> None:
    """Plot the mean accuracy of each variant with the range of its seeds.

    The upper panel is over rollout tokens, the lower one over the seconds of steps and evaluations.
    """
    with drawing(file, panels=2, share_x=False) as (tokens, seconds):
        _label(tokens, "rollout tokens")
        _label(seconds, "seconds of steps and evaluations")
        for index, (name, curves) in enumerate(results.items()):
            label = f"{name} (mean of {len(curves)})"
            draw_range(tokens, [curve.points for curve in curves], index=index, label=label)
            draw_range(seconds, [_over_seconds(curve) for curve in curves], index=index, label=name)


def _over_seconds(curve: Curve) -> list[tuple[float, float]]:
    accuracies = (accuracy for _, accuracy in curve.points)
    return list(zip(curve.times, accuracies, strict=True))


def _label(axes: Any, x: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel("held-out accuracy\n(sampled pass@1)")


@contextlib.contextmanager
def accuracy_over_tokens(file: Path) -> Iterator[Any]:
    """Axes of held-out accuracy over rollout tokens, written to a PNG file at the end."""
    with drawing(file) as (axes,):
        _label(axes, "rollout tokens")
        yield axes
