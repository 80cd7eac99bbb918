"""Results of a search: tables of the final runs and of all trials, and a JSON record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from megatron_rl.config.algorithms import AlgoSettings
from tests.lab.comparison.accuracy_curves import Curve, with_range
from tests.lab.comparison.search import Point, Trial, clip_range
from tests.lab.comparison.variants import ComparisonRefused, Run


def contest_table(
    runs: Mapping[tuple[str, str], Sequence[Run]],
    curves: Mapping[tuple[str, str], Sequence[Curve]],
    choices: Mapping[str, Mapping[str, Trial]],
) -> Iterator[str]:
    """Yield the lines of a Markdown table of the final runs, by variant and reason."""
    yield (
        "| variant | settings | chosen values | clip range | tokens clipped | end "
        "| gain, points (range) | seeds |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for (name, reason), group in curves.items():
        gains = [100 * curve.gain for curve in group]
        end = mean(curve.points[-1][1] for curve in group)
        algo = runs[name, reason][0].configuration.algo
        yield (
            f"| {name} | {reason} | {_settings(choices[name][reason].point)} | {_clip_text(algo)} "
            f"| {mean(curve.clipped_share for curve in group):.1%} | {end:.3f} "
            f"| {with_range(f'**{mean(gains):+.1f}**', gains, '+.1f')} "
            f"| {', '.join(str(curve.seed) for curve in group)} |"
        )


def trial_table(
    trials: Mapping[str, Sequence[Trial]], choices: Mapping[str, Mapping[str, Trial]]
) -> Iterator[str]:
    """Yield the lines of a Markdown table of all trials, with the reason of each choice."""
    yield "| variant | trial | end, mean | tokens clipped | chosen as |"
    yield "|---|---|---|---|---|"
    for name, group in trials.items():
        for trial in group:
            end = "diverged" if trial.accuracy is None else f"{trial.accuracy:.3f}"
            reasons = [reason for reason, choice in choices[name].items() if choice is trial]
            yield (
                f"| {name} | {_settings(trial.point)} | {end} | {trial.clipped_share:.1%} "
                f"| {', '.join(reasons)} |"
            )


def contest_record(
    budget: str,
    trials: Mapping[str, Sequence[Trial]],
    choices: Mapping[str, Mapping[str, Trial]],
    runs: Mapping[tuple[str, str], Sequence[Run]],
    curves: Mapping[tuple[str, str], Sequence[Curve]],
) -> dict[str, Any]:
    """Everything in the tables, for programs."""
    return {
        "budget": budget,
        "trials": {
            name: [_trial_record(trial) for trial in group] for name, group in trials.items()
        },
        "reported": [
            {
                "variant": name,
                "settings": reason,
                "chosen": dict(choices[name][reason].point.values),
                "clip_range": _clip_range_or_none(group[0].configuration.algo),
                "runs": [run.directory.name for run in group],
                "curves": [asdict(curve) for curve in curves[name, reason]],
            }
            for (name, reason), group in runs.items()
        ],
    }


def _trial_record(trial: Trial) -> dict[str, Any]:
    return {
        "settings": dict(trial.point.values),
        "accuracies": trial.accuracies,
        "accuracy": trial.accuracy,
        "clipped_share": trial.clipped_share,
    }


def _clip_range_or_none(algo: AlgoSettings) -> dict[str, float] | None:
    try:
        return clip_range(algo)
    except ComparisonRefused:
        return None


def _clip_text(algo: AlgoSettings) -> str:
    values = _clip_range_or_none(algo) or {}
    return ", ".join(f"{name}={value:g}" for name, value in values.items()) or "-"


def _settings(point: Point) -> str:
    return ", ".join(f"{key}={value}" for key, value in point.values)
