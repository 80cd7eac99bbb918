"""Arithmetic of the Kalman filter: numbers by hand, and invariants."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.prompts.selection.beliefs.arcsine import (
    MAX_ANGLE,
    all_correct_probability,
    all_incorrect_probability,
    observation,
    predict,
    update,
)
from megatron_rl.prompts.selection.beliefs.group_prediction import GroupPrediction


def mixed_probability(mean: float, variance: float, samples: int) -> float:
    return GroupPrediction(
        all_correct_probability(mean, variance, samples),
        all_incorrect_probability(mean, variance, samples),
    ).mixed_probability


def arrays(*numbers: float) -> tuple[np.ndarray, ...]:
    return tuple(np.array([number], np.float64) for number in numbers)


def observe(correct: float, samples: float, *, is_mixed: bool) -> tuple[float, float]:
    angle, noise = observation(*arrays(correct, samples), np.array([is_mixed]))
    return float(angle[0]), float(noise[0])


def test_observation_of_a_mixed_group() -> None:
    # 3 of 8: arcsin sqrt(3.375 / 8.75) = arcsin 0.621059; R = 1/34
    assert observe(3, 8, is_mixed=True) == pytest.approx((0.670093, 1 / 34), abs=1e-6)
    assert observe(4, 8, is_mixed=True)[0] == pytest.approx(np.pi / 4)


@pytest.mark.parametrize(
    ("correct", "samples", "angle"),
    [
        (0, 8, 0.0),
        (4, 4, MAX_ANGLE),
        # Equal scores of 0.5 each count as correct, as in `kind_of`.
        (4.0, 8, MAX_ANGLE),
        (3.2, 8, 0.0),
    ],
)
def test_observation_of_a_group_that_is_not_mixed(
    correct: float, samples: int, angle: float
) -> None:
    assert observe(correct, samples, is_mixed=False) == (angle, 1 / (2 * samples))


def test_update_by_hand() -> None:
    # V = 1/4 and R = 1/16: K = 4/5, so pi/4 moves to pi/20, and V to 1/20.
    mean, variance = update(*arrays(np.pi / 4, 0.25, 0.0, 1 / 16))
    assert mean[0] == pytest.approx(np.pi / 20)
    assert variance[0] == pytest.approx(0.05)


def test_predict_by_hand() -> None:
    # sin 2 pi/4 = 1: ten steps of 0.001, and 10 x 2e-4
    prediction = predict(np.pi / 4, 0.05, 10, 0.001, 2e-4)
    assert prediction == pytest.approx((np.pi / 4 + 0.01, 0.052))


def test_predict_has_limits() -> None:
    mean, _ = predict(MAX_ANGLE, 0.01, 100, 0.01, 2e-4)
    assert mean == pytest.approx(MAX_ANGLE), "no drift at the ends"
    _, variance = predict(0.3, 0.01, 10_000, 0.0, 2e-4)
    assert variance == 0.25


def test_predict_over_no_steps_changes_nothing() -> None:
    assert predict(0.3, 0.01, 0, 0.01, 0.02) == (0.3, 0.01)


@pytest.mark.parametrize(
    ("mean", "variance", "probability"),
    [
        # pi^2/16 = 0.616850: 1 - 2 exp(-4.934802)
        (np.pi / 4, 0.0, 1 - 2 * 0.0071918),
        # a = 5: 1 - 2 exp(-0.986960) / sqrt 5
        (np.pi / 4, 0.25, 1 - 2 * 0.372707 / 2.236068),
        (0.0, 0.0, 0.0),
    ],
)
def test_mixed_probability_by_hand(mean: float, variance: float, probability: float) -> None:
    assert mixed_probability(mean, variance, 8) == pytest.approx(probability, abs=1e-5)


def test_all_correct_probability_by_hand() -> None:
    assert all_correct_probability(np.pi / 4, 0.0, 8) == pytest.approx(0.0071918, abs=1e-6)
    assert all_correct_probability(MAX_ANGLE, 0.0, 8) == 1.0
    assert all_incorrect_probability(0.0, 0.0, 8) == 1.0


@pytest.mark.parametrize("samples", [4, 8, 16])
def test_mixed_probability_is_close_to_that_of_a_known_pass_rate(samples: int) -> None:
    rates = np.linspace(0.01, 0.99, 99)
    exact = 1 - (1 - rates) ** samples - rates**samples
    angles = np.arcsin(np.sqrt(rates)).tolist()
    approximation = np.array([mixed_probability(angle, 0.0, samples) for angle in angles])
    assert np.abs(approximation - exact).max() < 0.06


MEANS = st.floats(0, MAX_ANGLE)
VARIANCES = st.floats(1e-6, 0.25)


@given(MEANS, VARIANCES, st.integers(0, 10_000), st.floats(-0.02, 0.02), st.floats(2e-4, 0.02))
def test_predictions_stay_in_range(
    mean: float, variance: float, steps: int, drift: float, process_noise: float
) -> None:
    new_mean, new_variance = predict(mean, variance, steps, drift, process_noise)
    assert 0 <= new_mean <= MAX_ANGLE
    assert variance <= new_variance <= max(variance, 0.25)


@given(MEANS, VARIANCES, st.integers(2, 64), st.floats(0, 1), st.booleans())
def test_updates_stay_between_belief_and_observation(
    mean: float, variance: float, samples: int, share: float, is_mixed: bool
) -> None:
    angle, noise = observe(share * samples, samples, is_mixed=is_mixed)
    assert 0 <= angle <= MAX_ANGLE
    assert 0 < noise <= 0.25
    new_mean, new_variance = update(*arrays(mean, variance, angle, noise))
    assert 0 < new_variance[0] < variance
    assert min(mean, angle) - 1e-12 <= new_mean[0] <= max(mean, angle) + 1e-12


@given(MEANS, VARIANCES, st.integers(2, 64))
def test_mixed_probability_grows_with_samples_and_is_symmetric(
    mean: float, variance: float, samples: int
) -> None:
    probability = mixed_probability(mean, variance, samples)
    with_more_samples = mixed_probability(mean, variance, 2 * samples)
    assert 0 <= probability <= with_more_samples + 1e-12 <= 1 + 1e-12
    mirror = mixed_probability(MAX_ANGLE - mean, variance, samples)
    assert mirror == pytest.approx(probability)
