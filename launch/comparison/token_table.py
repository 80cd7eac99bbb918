"""Rollout tokens until equal held-out accuracy, as a table and as a plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from launch.comparison.accuracy_curves import Curve, accuracy_over_tokens
from launch.comparison.tokens_to_accuracy import common_level, rising, tokens_at
from megatron_rl.contracts.exit_codes import ExitCode, Failure


class LevelRefused(Failure):
    """No level, or not this one, that runs can be compared at."""

    exit_code = ExitCode.REFUSED


@dataclass(frozen=True)
class TokensToLevel:
    """tokens: of each variant's runs, in their order, until `level`."""

    level: float
    tokens: dict[str, list[float]]


def at_level(results: Mapping[str, Sequence[Curve]], level: float | None) -> TokensToLevel:
    """level: None takes the highest that all runs reach. Raises `LevelRefused` where one begins
    above or ends below.
    """
    runs = [(name, curve) for name, curves in results.items() for curve in curves]
    given, level = (
        level,
        common_level(curve.points for _, curve in runs) if level is None else level,
    )
    tokens: dict[str, list[float]] = {}
    for name, curve in runs:
        ends = rising(curve.points)
        reached = tokens_at(curve.points, level)
        said = f"--equal-accuracy: {name}, seed {curve.seed}, goes from {ends[0][1]:.3f} to {ends[-1][1]:.3f}"
        if reached is None:
            raise LevelRefused(
                f"{said}, below {level:g}. Give a lower level, none to have one chosen, or train longer"
            )
        if not reached:
            why = "was given" if given is not None else "is the highest that all runs reach"
            raise LevelRefused(
                f"{said}, and {level:g}, which {why}, is not above its start. Leave out the variant that does not "
                "learn, train longer, or give a higher level"
            )
        tokens.setdefault(name, []).append(reached)
    return TokensToLevel(level, tokens)


def token_table(
    results: Mapping[str, Sequence[Curve]], reached: TokensToLevel, against: str | None
) -> Iterator[str]:
    """The lines of a Markdown table.

    against: the variant whose tokens are divided by the others'.
    """
    yield f"Held-out accuracy {reached.level:.3f}, which all runs reach; evaluations' tokens are not counted."
    yield ""
    yield f"| variant | seed | start | end | rollout tokens to {reached.level:.3f} | in all |" + (
        f" fewer than {against} |" if against else ""
    )
    yield "|---|---|---|---|---|---|" + ("---|" if against else "")
    blank = " |" if against else ""
    for name, curves in results.items():
        counts = reached.tokens[name]
        for curve, count in zip(curves, counts, strict=True):
            start, (total, end) = curve.points[0][1], curve.points[-1]
            yield f"| {name} | {curve.seed} | {start:.3f} | {end:.3f} | {count:,.0f} | {total:,.0f} |{blank}"
        line = f"| **{name}** | mean | | | **{mean(counts):,.0f}** ({min(counts):,.0f} to {max(counts):,.0f}) | |"
        yield line + (f" {_times(reached.tokens[against], counts)} |" if against else "")


def _times(others: Sequence[float], own: Sequence[float]) -> str:
    """The ratio of the means, and the furthest that single runs are apart."""
    return f"**{mean(others) / mean(own):.2f}×** ({min(others) / max(own):.2f} to {max(others) / min(own):.2f})"


def plot_tokens(results: Mapping[str, Sequence[Curve]], reached: TokensToLevel, file: Path) -> None:
    """Each run as a thin line, each variant's rising mean as a thick one, and where it crosses the
    level.
    """
    with accuracy_over_tokens(file) as axes:
        for index, (name, curves) in enumerate(results.items()):
            colour = f"C{index}"
            for curve in curves:
                axes.plot(*zip(*curve.points, strict=True), color=colour, linewidth=0.7, alpha=0.45)
            evaluations = list(
                zip(*(curve.points for curve in curves), strict=False)
            )  # to the end of the shortest
            points = [
                (mean(tokens for tokens, _ in p), mean(accuracy for _, accuracy in p))
                for p in evaluations
            ]
            axes.plot(
                *zip(*rising(points), strict=True),
                color=colour,
                linewidth=2,
                label=f"{name} ({len(curves)})",
            )
            axes.plot(
                [mean(reached.tokens[name])],
                [reached.level],
                color=colour,
                marker="o",
                markersize=6,
            )
        axes.axhline(reached.level, color="0.5", linewidth=0.8, linestyle="--")
