"""Quantiles from histograms that add up over ranks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.training.replay.log_histogram import RESOLUTION, log_counts, quantile


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-900, 900).filter(lambda x: abs(x) > 1e-9), min_size=1, max_size=60),
    st.floats(0, 1),
)
def test_a_quantile_is_one_of_the_values_within_the_resolution(
    values: list[float], share: float
) -> None:
    estimate = quantile(log_counts(torch.tensor(values)), share)
    exact = sorted(abs(float(torch.tensor(x))) for x in values)[
        max(0, math.ceil(share * len(values) - 1e-6) - 1)
    ]
    assert estimate == pytest.approx(exact, rel=RESOLUTION * 1.01 + 1e-6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-30, 30), max_size=40), st.integers(0, 40))
def test_counts_of_two_ranks_are_those_of_all(values: list[float], cut: int) -> None:
    parts = log_counts(torch.tensor(values[:cut])) + log_counts(torch.tensor(values[cut:]))
    assert torch.equal(parts, log_counts(torch.tensor(values)))


def test_the_tail_of_a_thousand() -> None:
    values = torch.cat([torch.full((999,), 0.01), torch.tensor([3.0])])
    assert quantile(log_counts(values), 0.999) == pytest.approx(0.01, rel=RESOLUTION)
    assert quantile(log_counts(values), 0.9991) == pytest.approx(3.0, rel=RESOLUTION)


def test_values_outside_of_the_range() -> None:
    assert quantile(log_counts(torch.zeros(3)), 0.999) == 0.0
    assert quantile(log_counts(torch.tensor([1.0, 1e6])), 0.999) == math.inf
    assert math.isnan(quantile(log_counts(torch.tensor([])), 0.5))
    for value in (math.nan, math.inf):
        assert math.isnan(quantile(log_counts(torch.tensor([1.0, value])), 0.5))
