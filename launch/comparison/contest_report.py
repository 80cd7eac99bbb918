"""What a contest found: the reported runs, all trials, and all of it for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from launch.comparison.accuracy_curves import Curve
from launch.comparison.search import Point, Trial, clip_widths
from launch.comparison.variants import ComparisonRefused, Run
from megatron_rl.config.algorithms import AlgoSettings


def contest_table(
    reported: Mapping[tuple[str, str], Sequence[Run]],
    curves: Mapping[tuple[str, str], Sequence[Curve]],
    chosen: Mapping[str, Mapping[str, Trial]],
) -> Iterator[str]:
    """The lines of a Markdown table: each variant at its best and at its given widths, on the
    reported seeds.
    """
    yield "| variant | settings | chosen | clip widths | tokens clipped | end | gain, points (range) | seeds |"
    yield "|---|---|---|---|---|---|---|---|"
    for (name, how), own in curves.items():
        runs = reported[name, how]
        gains, end = [100 * curve.gain for curve in own], mean(curve.points[-1][1] for curve in own)
        yield (
            f"| {name} | {how} | {_settings(chosen[name][how].point)} | {_widths(runs[0].configuration.algo)} "
            f"| {mean(curve.clipped for curve in own):.1%} | {end:.3f} "
            f"| **{mean(gains):+.1f}** ({min(gains):+.1f} to {max(gains):+.1f}) "
            f"| {', '.join(str(curve.seed) for curve in own)} |"
        )


def trial_table(
    trials: Mapping[str, Sequence[Trial]], chosen: Mapping[str, Mapping[str, Trial]]
) -> Iterator[str]:
    """The lines of a Markdown table: all trials, and what each was chosen for."""
    yield "| variant | trial | end, mean | tokens clipped | chosen as |"
    yield "|---|---|---|---|---|"
    for name, own in trials.items():
        for trial in own:
            end = "diverged" if trial.accuracy is None else f"{trial.accuracy:.3f}"
            taken = ", ".join(how for how, best_one in chosen[name].items() if best_one is trial)
            yield f"| {name} | {_settings(trial.point)} | {end} | {trial.clipped:.1%} | {taken} |"


def contest_record(
    budget: str,
    trials: Mapping[str, Sequence[Trial]],
    chosen: Mapping[str, Mapping[str, Trial]],
    reported: Mapping[tuple[str, str], Sequence[Run]],
    curves: Mapping[tuple[str, str], Sequence[Curve]],
) -> dict[str, Any]:
    """All of it, for programs."""
    return {
        "budget": budget,
        "trials": {name: [_trial_record(trial) for trial in own] for name, own in trials.items()},
        "reported": [
            {
                "variant": name,
                "settings": how,
                "chosen": dict(chosen[name][how].point.values),
                "clip_widths": _widths_or_none(runs[0].configuration.algo),
                "runs": [run.directory.name for run in runs],
                "curves": [asdict(curve) for curve in curves[name, how]],
            }
            for (name, how), runs in reported.items()
        ],
    }


def _trial_record(trial: Trial) -> dict[str, Any]:
    return {
        "settings": dict(trial.point.values),
        "accuracies": trial.accuracies,
        "accuracy": trial.accuracy,
        "clipped": trial.clipped,
    }


def _widths_or_none(algo: AlgoSettings) -> dict[str, float] | None:
    try:
        return clip_widths(algo)
    except ComparisonRefused:
        return None


def _widths(algo: AlgoSettings) -> str:
    return (
        ", ".join(f"{name}={width:g}" for name, width in (_widths_or_none(algo) or {}).items())
        or "-"
    )


def _settings(point: Point) -> str:
    return ", ".join(f"{key}={value}" for key, value in point.values)
