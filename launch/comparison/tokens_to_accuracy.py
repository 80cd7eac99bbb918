"""How many rollout tokens a run needed to reach an accuracy, from noisy evaluations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

Points = Sequence[tuple[float, float]]  # (rollout tokens so far, accuracy)


def rising(points: Points) -> list[tuple[float, float]]:
    """A curve without its noise: the rising one that is closest in least squares (isotonic
    regression).

    Neighbours that do not rise are pooled until all do (pool adjacent violators); a pool stands at
    the means of its points' tokens and accuracies. Strictly rising in both, so each accuracy
    between its ends is reached once.
    """
    pools: list[tuple[int, float, float]] = []  # points, sum of tokens, sum of accuracies
    for tokens, accuracy in points:
        pools.append((1, tokens, accuracy))
        while len(pools) > 1 and pools[-2][2] / pools[-2][0] >= pools[-1][2] / pools[-1][0]:
            last, before = pools.pop(), pools.pop()
            pools.append((last[0] + before[0], last[1] + before[1], last[2] + before[2]))
    return [(tokens / count, accuracy / count) for count, tokens, accuracy in pools]


def tokens_at(points: Points, level: float) -> float | None:
    """Rollout tokens until the rising curve is at `level`, linear between its points; None where it
    ends below.

    0 for a level that the curve begins at or above.
    """
    curve = rising(points)
    if curve[0][1] >= level:
        return 0.0
    for (before, low), (after, high) in pairwise(curve):
        if high >= level:
            return before + (after - before) * (level - low) / (high - low)
    return None


def common_level(curves: Iterable[Points]) -> float:
    """The highest accuracy that every rising curve reaches, down to a tenth of a percent."""
    lowest = min(rising(points)[-1][1] for points in curves)
    return min(
        math.floor(lowest * 1000 + 1e-9) / 1000, lowest
    )  # 0.7 may be a little less in binary
