"""Metrics of the difference between the sampling policy and the trainer's."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.losses import mismatch_by_age, rollout_mismatch
from megatron_rl.losses.mismatch import k3


def means(old: list[float], rollout: list[float]) -> dict[str, float]:
    sums = rollout_mismatch(torch.tensor(old), torch.tensor(rollout))
    return {key: float(pair[0] / pair[1]) for key, pair in sums.items()}


def test_known_values() -> None:
    # log w is 0.1 and -0.2, so the mean of |log w| is 0.15.
    # k3 is e^0.1 - 1.1 and e^-0.2 - 0.8, so its mean is (0.00517092 + 0.01873075) / 2.
    # ess is 2 / (e^0.2 + e^-0.4) = 2 / (1.22140276 + 0.67032005).
    result = means([-1.0, -1.2], [-1.1, -1.0])
    assert result["mismatch/logprob_abs_mean"] == pytest.approx(0.15, rel=1e-5)
    assert result["mismatch/k3_kl"] == pytest.approx(0.01195084, rel=1e-4)
    assert result["mismatch/ess"] == pytest.approx(1.05723606, rel=1e-5)


def test_equal_policies() -> None:
    assert means([-1.0, -3.0], [-1.0, -3.0]) == {
        "mismatch/logprob_abs_mean": 0.0,
        "mismatch/k3_kl": 0.0,
        "mismatch/ess": 1.0,
    }


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-12, 0), st.floats(-12, 0)), min_size=2, max_size=30),
    st.integers(1, 29),
)
def test_sums_of_parts_add_up(pairs: list[tuple[float, float]], cut: int) -> None:
    old, rollout = torch.tensor(pairs).T
    whole = rollout_mismatch(old, rollout)
    first = rollout_mismatch(old[:cut], rollout[:cut])
    second = rollout_mismatch(old[cut:], rollout[cut:])
    for key, pair in whole.items():
        torch.testing.assert_close(first[key] + second[key], pair, rtol=1e-4, atol=1e-4)
        assert pair[0] >= 0


def test_k3_estimates_the_divergence() -> None:
    # KL(p || q) = 0.7 ln(0.7 / 0.4) + 0.3 ln(0.3 / 0.6) = 0.18378689
    p = torch.tensor([0.7, 0.3])
    q = torch.tensor([0.4, 0.6])
    assert float((p * k3((q / p).log())).sum()) == pytest.approx(0.18378689, rel=1e-5)


def test_effective_sample_size_of_known_weights() -> None:
    # w is 1/2 with probability 2/3 and 2 with probability 1/3. E w = 1 and E w^2 = 3/2, so the
    # effective share is 2/3.
    result = means([-math.log(2.0), -math.log(2.0), math.log(2.0)], [0.0] * 3)
    assert result["mismatch/ess"] == pytest.approx(2 / 3)


def test_nan_is_propagated_and_empty_batches_count_nothing() -> None:
    assert all(math.isnan(value) for value in means([math.nan, -1.0], [-1.0, -1.0]).values())
    not_sampled = means([-1.0, -1.0], [-1.0, math.nan])
    assert all(math.isnan(value) for value in not_sampled.values())
    empty = rollout_mismatch(torch.zeros(0), torch.zeros(0))
    assert all(pair.tolist() == [0.0, 0.0] for pair in empty.values())


def test_extreme_ratios_stay_finite() -> None:
    assert all(math.isfinite(value) for value in means([0.0, -1e4], [-1e4, 0.0]).values())


def test_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be \[T\]"):
        rollout_mismatch(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mismatch_of_each_age_is_that_of_its_tokens(dtype: torch.dtype) -> None:
    """The fourth token was not sampled: it has no log-probability, and no age."""
    old = torch.tensor([-1.0, -1.2, -2.0, -1.0, -3.0]).to(dtype)
    rollout = torch.tensor([-1.1, -1.0, -2.5, math.nan, -3.25]).to(dtype)
    sums = mismatch_by_age(old, rollout, np.array([0, 2, 0, -1, 2]))
    assert sums.keys() == {
        f"mismatch/age/{age}/{name}" for age in (0, 2) for name in ("logprob_abs_mean", "k3_kl")
    }
    for age, places in ((0, [0, 2]), (2, [1, 4])):
        same_tokens = rollout_mismatch(old[places], rollout[places])
        for name in ("logprob_abs_mean", "k3_kl"):
            pair = sums[f"mismatch/age/{age}/{name}"]
            assert pair.dtype == torch.float32
            assert pair.tolist() == same_tokens[f"mismatch/{name}"].tolist()
            assert pair[0] > 0 and pair[1] == 2


def test_without_sampled_tokens_there_is_no_age() -> None:
    assert mismatch_by_age(torch.zeros(0), torch.zeros(0), np.zeros(0, np.int64)) == {}
    nothing = torch.full((1,), math.nan)
    assert mismatch_by_age(torch.zeros(1), nothing, np.array([-1])) == {}
