"""Turns of a mixture's sources keep to their weights after any number of turns."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.prompts.shares import Shares

WEIGHTS = st.lists(st.floats(0.001, 1000).map(lambda x: round(x, 3)), min_size=1, max_size=8)


@given(weights=WEIGHTS, turns=st.integers(1, 120))
@settings(max_examples=80, deadline=None)
def test_every_prefix_is_within_one_turn_of_the_weights(weights: list[float], turns: int) -> None:
    shares = Shares(weights)
    exact = [int(weight * 1000 + 0.5) for weight in weights]
    for turn in range(1, turns + 1):
        shares.next_source()
        for count, weight in zip(shares.counts, exact, strict=True):
            assert abs(count * sum(exact) - turn * weight) < sum(exact)


@pytest.mark.slow
@given(weights=WEIGHTS, start=st.integers(0, 300), turns=st.integers(1, 100))
@settings(max_examples=100, deadline=None)
def test_no_window_gives_a_source_more_than_most_in(
    weights: list[float], start: int, turns: int
) -> None:
    shares = Shares(weights)
    for _ in range(start):
        shares.next_source()
    counts = Counter(shares.next_source() for _ in range(turns))
    for index in range(len(weights)):
        assert counts[index] <= shares.most_in(index, turns)


@pytest.mark.parametrize(
    ("weights", "turns"),
    [([1], "000000"), ([1, 1], "010101"), ([2, 1], "001001"), ([0.5, 0.25, 0.25], "01020102")],
)
def test_small_mixtures(weights: list[float], turns: str) -> None:
    shares = Shares(weights)
    assert "".join(str(shares.next_source()) for _ in turns) == turns
