"""The belief's arithmetic: numbers worked by hand, and what must hold for any."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.prompts.selection.arcsine import (
    HIGHEST,
    chance_of_mixed,
    observation,
    predicted,
    updated,
)


def one(*numbers: float) -> tuple[np.ndarray, ...]:
    return tuple(np.array([number], np.float64) for number in numbers)


def seen(right: float, samples: float, mixed: bool) -> tuple[float, float]:
    z, noise = observation(*one(right, samples), np.array([mixed]))
    return float(z[0]), float(noise[0])


def test_what_a_group_says() -> None:
    # 3 of 8: arcsin sqrt(3.375 / 8.75) = arcsin 0.621059; R = 1/34. Flat ones: 0 or pi/2, R = 1/16
    # of 8, 1/8 of 4.
    assert seen(3, 8, True) == pytest.approx((0.670093, 1 / 34), abs=1e-6)
    assert seen(0, 8, False) == (0.0, 1 / 16) and seen(4, 4, False) == (HIGHEST, 1 / 8)
    # Half of the tests each: no rollout differs from another, and the group is as flat as kind_of
    # says, on the right
    assert seen(4.0, 8, False) == (HIGHEST, 1 / 16) and seen(3.2, 8, False) == (0.0, 1 / 16)
    assert seen(4, 8, True)[0] == pytest.approx(np.pi / 4)


def test_a_belief_moves_towards_what_was_seen() -> None:
    # V = 1/4 and R = 1/16: K = 4/5, so pi/4 moves to pi/20, and V to 1/20
    mean, variance = updated(*one(np.pi / 4, 0.25, 0.0, 1 / 16))
    assert mean[0] == pytest.approx(np.pi / 20) and variance[0] == pytest.approx(0.05)


def test_a_belief_drifts_and_grows_wider() -> None:
    # sin 2 pi/4 = 1: ten steps of 0.001; 10 x 2e-4. At the ends nothing drifts
    mean, variance = predicted(*one(np.pi / 4, 0.05, 10), 0.001, 2e-4)
    assert mean[0] == pytest.approx(np.pi / 4 + 0.01) and variance[0] == pytest.approx(0.052)
    assert predicted(*one(HIGHEST, 0.01, 100), 0.01, 2e-4)[0][0] == pytest.approx(HIGHEST)
    assert predicted(*one(0.3, 0.01, 10_000), 0.0, 2e-4)[1][0] == 0.25
    assert predicted(*one(0.3, 0.01, 0), 0.01, 0.02) == one(0.3, 0.01)


def test_the_chance_of_a_mixed_group() -> None:
    # pi^2/16 = 0.616850: V = 0 gives 1 - 2 exp(-4.934802); V = 1/4 gives a = 5, 1 - 2
    # exp(-0.986960) / sqrt 5
    assert chance_of_mixed(*one(np.pi / 4, 0), 8)[0] == pytest.approx(1 - 2 * 0.0071918, abs=1e-6)
    assert chance_of_mixed(*one(np.pi / 4, 0.25), 8)[0] == pytest.approx(
        1 - 2 * 0.372707 / 2.236068, abs=1e-5
    )
    assert chance_of_mixed(*one(0, 0), 8)[0] == pytest.approx(0, abs=1e-6)


def test_the_chance_is_close_to_that_of_a_known_pass_rate() -> None:
    rates = np.linspace(0.01, 0.99, 99)
    for samples in (4, 8, 16):
        exact = 1 - (1 - rates) ** samples - rates**samples
        found = chance_of_mixed(np.arcsin(np.sqrt(rates)), np.zeros(99), samples)
        assert np.abs(found - exact).max() < 0.06


@given(
    mean=st.floats(0, HIGHEST),
    variance=st.floats(1e-6, 0.25),
    steps=st.integers(0, 10_000),
    drift=st.floats(-0.02, 0.02),
    growth=st.floats(2e-4, 0.02),
    samples=st.integers(2, 64),
    share=st.floats(0, 1),
    mixed=st.booleans(),
)
def test_beliefs_stay_beliefs(
    mean: float,
    variance: float,
    steps: int,
    drift: float,
    growth: float,
    samples: int,
    share: float,
    mixed: bool,
) -> None:
    m, v = predicted(*one(mean, variance, steps), drift, growth)
    assert 0 <= m[0] <= HIGHEST and variance <= v[0] <= max(variance, 0.25)
    z, noise = observation(*one(share * samples, samples), np.array([mixed]))
    assert 0 <= z[0] <= HIGHEST and 0 < noise[0] <= 0.25
    after, narrower = updated(m, v, z, noise)
    assert 0 < narrower[0] < v[0]
    assert min(m[0], z[0]) - 1e-12 <= after[0] <= max(m[0], z[0]) + 1e-12
    chances = [chance_of_mixed(after, narrower, n)[0] for n in (2, samples, 2 * samples)]
    assert all(0 <= chance <= 1 for chance in chances) and chances[1] <= chances[2] + 1e-12
    assert chance_of_mixed(HIGHEST - after, narrower, samples)[0] == pytest.approx(chances[1])
