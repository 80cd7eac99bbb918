"""Rollout tokens until an accuracy, for handwritten curves and for generated ones."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.comparison.tokens_to_accuracy import (
    highest_common_level,
    rising_curve,
    tokens_to_reach,
)

CURVES = st.lists(
    st.tuples(st.integers(1, 1000), st.integers(0, 1000)), min_size=1, max_size=12
).map(
    lambda steps: [
        (float(sum(t for t, _ in steps[: i + 1])), a / 1000) for i, (_, a) in enumerate(steps)
    ]
)


def test_a_level_between_two_evaluations_is_interpolated() -> None:
    points = [(0.0, 0.2), (1000.0, 0.4), (3000.0, 0.8)]
    assert rising_curve(points) == points
    assert tokens_to_reach(points, 0.3) == pytest.approx(500)
    assert tokens_to_reach(points, 0.4) == pytest.approx(1000)
    assert tokens_to_reach(points, 0.5) == pytest.approx(1500)
    assert tokens_to_reach(points, 0.8) == pytest.approx(3000)
    assert tokens_to_reach(points, 0.81) is None
    assert tokens_to_reach(points, 0.2) == tokens_to_reach(points, 0.1) == 0


def test_a_lucky_evaluation_does_not_reach_the_level() -> None:
    """0.7 at 1,000 tokens and 0.5 after it are one point, 0.6 at 1,500."""
    points = [(0.0, 0.2), (1000.0, 0.7), (2000.0, 0.5), (3000.0, 0.8)]
    assert rising_curve(points) == [(0.0, 0.2), (1500.0, pytest.approx(0.6)), (3000.0, 0.8)]
    assert tokens_to_reach(points, 0.65) == pytest.approx(1875)


def test_accuracy_that_a_run_has_lost_does_not_count() -> None:
    points = [(0.0, 0.2), (1000.0, 0.8), (2000.0, 0.1), (3000.0, 0.1)]
    curve = rising_curve(points)
    assert len(curve) == 2 and curve[-1] == (2000.0, pytest.approx(1 / 3))
    assert tokens_to_reach(points, 0.5) is None


def test_the_common_level_is_the_lowest_end() -> None:
    better = [(0.0, 0.2), (10.0, 0.9)]
    worse = [(0.0, 0.2), (10.0, 0.6543)]
    assert highest_common_level([better, worse]) == 0.654
    assert highest_common_level([better, [(0.0, 0.2), (10.0, 0.7)]]) == 0.7


@given(CURVES)
def test_a_rising_curve_keeps_range_and_order(points: list[tuple[float, float]]) -> None:
    curve = rising_curve(points)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(curve))
    assert points[0][0] <= curve[0][0] and curve[-1][0] <= points[-1][0]
    accuracies = [accuracy for _, accuracy in points]
    assert min(accuracies) - 1e-9 <= curve[0][1] <= curve[-1][1] <= max(accuracies) + 1e-9
    again = rising_curve(curve)
    assert [p[1] for p in again] == [p[1] for p in curve], "a rising curve stays as it is"


@given(CURVES, st.floats(0.001, 0.999), st.floats(0, 0.1))
def test_a_higher_level_takes_more_tokens(
    points: list[tuple[float, float]], level: float, difference: float
) -> None:
    low = tokens_to_reach(points, level)
    high = tokens_to_reach(points, level + difference)
    assert high is None or (low is not None and low <= high <= points[-1][0])


@given(st.lists(CURVES, min_size=1, max_size=4))
def test_every_run_reaches_the_common_level(curves: list[list[tuple[float, float]]]) -> None:
    level = highest_common_level(curves)
    assert all(tokens_to_reach(points, level) is not None for points in curves)
