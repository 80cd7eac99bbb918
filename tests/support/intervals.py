"""Intervals of measurements."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

# Student's t at 97.5 % by degrees of freedom; beyond them 2 is close enough.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14)


def half_width(values: Sequence[float]) -> float:
    """Return half of the interval of 95 % of the mean."""
    freedom = len(values) - 1
    factor = _T[freedom - 1] if freedom <= len(_T) else 2.0
    return float(factor * stdev(values) / len(values) ** 0.5)


def interval(values: Sequence[float], decimals: int = 2) -> str:
    """Return the mean and the half width of its interval of 95 %, as tables show them."""
    return f"{fmean(values):.{decimals}f} ± {half_width(values):.{decimals}f}"
