"""Process noise: numbers by hand."""

import numpy as np
import pytest

from megatron_rl.prompts.selection.beliefs.process_noise import (
    MAX_RATE,
    MIN_RATE,
    ProcessNoise,
    excess_variance,
)

A = ("task", "a")
B = ("task", "b")


def learn(
    process_noise: ProcessNoise,
    stratum: tuple[str, str],
    *,
    steps: float,
    excess: float,
    variance: float = 0.1,
    count: int = 1,
) -> None:
    arrays = [np.full(count, number) for number in (steps, excess, variance)]
    process_noise.learn([stratum] * count, *arrays)


def test_small_errors_of_groups_that_are_not_mixed_are_ignored() -> None:
    errors = np.array([0.1, 0.1, 0.5, 0.5])
    excess = excess_variance(errors, np.full(4, 0.05), np.array([True, False, True, False]))
    assert excess == pytest.approx([0.01 - 0.05, 0.0, 0.25 - 0.05, 0.25 - 0.05])


def test_rate_starts_at_the_minimum() -> None:
    assert ProcessNoise().shared_rate == ProcessNoise().rate(A) == MIN_RATE == 2e-4


def test_rate_of_a_stratum_is_shrunk_towards_the_shared_rate() -> None:
    process_noise = ProcessNoise()
    # 100 x 10 x 0.05 / 0.1^2 = 5000 over 100 x (10 / 0.1)^2 = 1e6
    learn(process_noise, A, steps=10.0, excess=0.05, count=100)
    assert process_noise.shared_rate == pytest.approx((5000 + 2e6 * 2e-4) / (1e6 + 2e6))
    shared_rate = process_noise.shared_rate
    assert process_noise.rate(A) == pytest.approx((5000 + 1e6 * shared_rate) / (1e6 + 1e6))
    assert process_noise.rate(B) == shared_rate


def test_rate_has_limits() -> None:
    process_noise = ProcessNoise()
    learn(process_noise, A, steps=10.0, excess=2.0, count=100)
    learn(process_noise, B, steps=10.0, excess=-2.0, count=100)
    assert process_noise.rate(A) == MAX_RATE == 0.02
    assert process_noise.rate(B) == MIN_RATE


def test_groups_without_elapsed_steps_are_ignored() -> None:
    process_noise = ProcessNoise()
    learn(process_noise, A, steps=0.0, excess=2.0)
    assert process_noise.shared_rate == process_noise.rate(A) == MIN_RATE


def test_past_observations_decay() -> None:
    process_noise = ProcessNoise()
    learn(process_noise, A, steps=10.0, excess=0.1, count=1000)
    rate = process_noise.rate(A)
    process_noise.decay(35)
    factor = 0.98**35  # 0.493
    shared_rate = (factor * 1e5 + 400) / (factor * 1e7 + 2e6)
    stratum_rate = (factor * 1e5 + 1e6 * shared_rate) / (factor * 1e7 + 1e6)
    assert process_noise.shared_rate == pytest.approx(shared_rate)
    assert process_noise.rate(A) == pytest.approx(stratum_rate)
    assert process_noise.rate(A) < rate
    process_noise.decay(10_000)
    assert process_noise.rate(A) == pytest.approx(MIN_RATE)


def test_state_is_restored_bit_for_bit() -> None:
    process_noise = ProcessNoise()
    learn(process_noise, A, steps=3.0, excess=0.1, variance=0.07)
    learn(process_noise, B, steps=5.0, excess=0.3, variance=0.11)
    process_noise.decay(3)
    copy = ProcessNoise()
    copy.restore(process_noise.state())
    assert copy == process_noise
    assert copy.state() == process_noise.state()


def test_empty_state_is_the_initial_one() -> None:
    process_noise = ProcessNoise()
    learn(process_noise, A, steps=3.0, excess=0.1)
    process_noise.restore(())
    assert process_noise == ProcessNoise()
