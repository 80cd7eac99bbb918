"""Rollout tokens that a run needed to reach an accuracy, from noisy evaluations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

Points = Sequence[tuple[float, float]]  # (rollout tokens so far, accuracy)


def rising_curve(points: Points) -> list[tuple[float, float]]:
    """Remove the noise of a curve: the closest rising curve in least squares.

    This is isotonic regression by pool adjacent violators. Neighbours that do not rise are pooled
    until all do. A pool stands at the mean tokens and the mean accuracy of its points. The result
    rises strictly in both, so it reaches each accuracy between its ends once.
    """
    pools: list[tuple[int, float, float]] = []  # (points, sum of tokens, sum of accuracies)
    for tokens, accuracy in points:
        pools.append((1, tokens, accuracy))
        while len(pools) > 1 and pools[-2][2] / pools[-2][0] >= pools[-1][2] / pools[-1][0]:
            last = pools.pop()
            previous = pools.pop()
            pools.append((last[0] + previous[0], last[1] + previous[1], last[2] + previous[2]))
    return [(tokens / count, accuracy / count) for count, tokens, accuracy in pools]


def tokens_to_reach(points: Points, level: float) -> float | None:
    """Rollout tokens until the rising curve is at `level`, linear between its points.

    0 for a level that the curve starts at or above, None for a level above its end.
    """
    curve = rising_curve(points)
    if curve[0][1] >= level:
        return 0.0
    for (start, low), (end, high) in pairwise(curve):
        if high >= level:
            return start + (end - start) * (level - low) / (high - low)
    return None


def highest_common_level(curves: Iterable[Points]) -> float:
    """The highest accuracy that every rising curve reaches, rounded down to 0.1 %."""
    lowest = min(rising_curve(points)[-1][1] for points in curves)
    # 0.7 may be slightly less in binary.
    return min(math.floor(lowest * 1000 + 1e-9) / 1000, lowest)
