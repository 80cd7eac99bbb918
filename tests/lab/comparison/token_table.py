"""Rollout tokens until equal held-out accuracy, as a table and as a plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from tests.lab.comparison.accuracy_curves import Curve, accuracy_over_tokens, with_range
from tests.lab.comparison.tokens_to_accuracy import (
    highest_common_level,
    rising_curve,
    tokens_to_reach,
)


class LevelRefused(Failure):
    """The runs cannot be compared at this accuracy."""

    exit_code = ExitCode.REFUSED


@dataclass(frozen=True)
class TokensToLevel:
    """Rollout tokens of every run until an accuracy.

    level: the accuracy.
    tokens: of each variant's runs, in their order.
    """

    level: float
    tokens: dict[str, list[float]]


def tokens_at_level(
    results: Mapping[str, Sequence[Curve]], requested_level: float | None
) -> TokensToLevel:
    """Measure the tokens of every run until a level.

    requested_level: None takes the highest level that all runs reach. Raises `LevelRefused` for a
    run that starts above the level or ends below it.
    """
    runs = [(name, curve) for name, curves in results.items() for curve in curves]
    if requested_level is None:
        level = highest_common_level(curve.points for _, curve in runs)
        origin = "which is the highest that all runs reach"
    else:
        level = requested_level
        origin = "which was requested"
    tokens: dict[str, list[float]] = {}
    for name, curve in runs:
        tokens.setdefault(name, []).append(_tokens_of(name, curve, level, origin))
    return TokensToLevel(level, tokens)


def _tokens_of(name: str, curve: Curve, level: float, origin: str) -> float:
    ends = rising_curve(curve.points)
    subject = (
        f"--equal-accuracy: {name}, seed {curve.seed}, goes from {ends[0][1]:.3f} to "
        f"{ends[-1][1]:.3f}"
    )
    count = tokens_to_reach(curve.points, level)
    if count is None:
        raise LevelRefused(
            f"{subject}, below {level:g}. Give a lower level, no level to have one chosen, or "
            "train longer"
        )
    if count == 0:
        raise LevelRefused(
            f"{subject}, and {level:g}, {origin}, is not above its start. Leave out the variant "
            "that does not learn, train longer, or give a higher level"
        )
    return count


def token_table(
    results: Mapping[str, Sequence[Curve]], tokens: TokensToLevel, against: str | None
) -> Iterator[str]:
    """Yield a sentence and the lines of a Markdown table.

    against: the variant whose tokens are divided by each variant's tokens.
    """
    yield (
        f"Held-out accuracy {tokens.level:.3f}, which all runs reach. Tokens of evaluations are "
        "not counted."
    )
    yield ""
    ratio_title = f" fewer than {against} |" if against else ""
    yield (
        f"| variant | seed | start | end | rollout tokens to {tokens.level:.3f} | total |"
        f"{ratio_title}"
    )
    yield "|---|---|---|---|---|---|" + ("---|" if against else "")
    blank = " |" if against else ""
    for name, curves in results.items():
        counts = tokens.tokens[name]
        for curve, count in zip(curves, counts, strict=True):
            start = curve.points[0][1]
            total, end = curve.points[-1]
            yield (
                f"| {name} | {curve.seed} | {start:.3f} | {end:.3f} | {count:,.0f} "
                f"| {total:,.0f} |{blank}"
            )
        ratio = f" {_ratio(tokens.tokens[against], counts)} |" if against else ""
        yield (
            f"| **{name}** | mean | | | "
            f"{with_range(f'**{mean(counts):,.0f}**', counts, ',.0f')} | |{ratio}"
        )


def _ratio(others: Sequence[float], counts: Sequence[float]) -> str:
    """The ratio of the means, and the smallest and largest ratio of single runs."""
    smallest = min(others) / max(counts)
    largest = max(others) / min(counts)
    return f"**{mean(others) / mean(counts):.2f}×** ({smallest:.2f} to {largest:.2f})"


def plot_tokens(results: Mapping[str, Sequence[Curve]], tokens: TokensToLevel, file: Path) -> None:
    """Plot each run as a thin line, and the rising mean of each variant as a thick one.

    A dot marks where the mean crosses the level.
    """
    with accuracy_over_tokens(file) as axes:
        for index, (name, curves) in enumerate(results.items()):
            color = f"C{index}"
            for curve in curves:
                axes.plot(*zip(*curve.points, strict=True), color=color, linewidth=0.7, alpha=0.45)
            mean_points = rising_curve(_mean_points(curves))
            label = f"{name} ({len(curves)})"
            axes.plot(*zip(*mean_points, strict=True), color=color, linewidth=2, label=label)
            count = mean(tokens.tokens[name])
            axes.plot([count], [tokens.level], color=color, marker="o", markersize=6)
        axes.axhline(tokens.level, color="0.5", linewidth=0.8, linestyle="--")


def _mean_points(curves: Sequence[Curve]) -> list[tuple[float, float]]:
    """The mean of the curves' points, up to the end of the shortest."""
    evaluations = zip(*(curve.points for curve in curves), strict=False)
    return [
        (mean(tokens for tokens, _ in points), mean(accuracy for _, accuracy in points))
        for points in evaluations
    ]
