"""How fast certainty is lost: numbers worked by hand."""

import numpy as np
import pytest

from megatron_rl.prompts.selection.process_noise import FASTEST, SLOWEST, ProcessNoise, surprise

A, B = ("task", "a"), ("task", "b")


def learnt(wander: ProcessNoise, *told: tuple[tuple[str, str], float, float, float]) -> None:
    wander.learn(
        [t[0] for t in told], *(np.array([t[i] for t in told], np.float64) for i in (1, 2, 3))
    )


def test_a_flat_group_that_surprises_nobody_says_nothing() -> None:
    missed, expected = np.array([0.1, 0.1, 0.5, 0.5]), np.full(4, 0.05)
    told = surprise(missed, expected, np.array([True, False, True, False]))
    assert told == pytest.approx([0.01 - 0.05, 0.0, 0.25 - 0.05, 0.25 - 0.05])


def test_growth_is_learnt_by_stratum_and_borrows_from_all() -> None:
    wander = ProcessNoise()
    assert wander.shared == wander.of(A) == SLOWEST == 2e-4
    # 100 groups after 10 steps, more variance by 0.05, S = 0.1: 100 x 10 x 0.05 / 0.01 = 5000 over
    # 100 x (10 / 0.1)^2
    learnt(wander, *[(A, 10.0, 0.05, 0.1)] * 100)
    assert wander.shared == pytest.approx((5000 + 2e6 * 2e-4) / (1e6 + 2e6))
    assert wander.of(A) == pytest.approx((5000 + 1e6 * wander.shared) / (1e6 + 1e6))
    assert wander.of(B) == wander.shared, "nothing was seen of it"
    learnt(wander, *[(B, 10.0, -0.05, 0.1)] * 100)
    assert wander.of(B) == SLOWEST < wander.of(A), "never slower"
    learnt(wander, *[(A, 10.0, 2.0, 0.1)] * 100)
    assert wander.of(A) == FASTEST == 0.02


def test_a_group_of_the_same_step_or_of_a_first_time_says_nothing() -> None:
    wander = ProcessNoise()
    learnt(wander, (A, 0.0, 2.0, 0.1))
    assert wander.shared == wander.of(A) == SLOWEST


def test_how_fast_it_once_was_is_forgotten() -> None:
    wander = ProcessNoise()
    learnt(wander, *[(A, 10.0, 0.1, 0.1)] * 1000)
    before = wander.of(A)
    wander.fade(35)  # 0.98^35 = 0.493
    kept = 0.98**35
    shared = (kept * 1e5 + 400) / (kept * 1e7 + 2e6)
    assert wander.shared == pytest.approx(shared)
    assert wander.of(A) == pytest.approx((kept * 1e5 + 1e6 * shared) / (kept * 1e7 + 1e6))
    assert wander.of(A) < before
    wander.fade(10_000)
    assert wander.of(A) == pytest.approx(SLOWEST)


def test_what_was_learnt_is_restored_bit_for_bit() -> None:
    wander, again = ProcessNoise(), ProcessNoise()
    learnt(wander, (A, 3.0, 0.1, 0.07), (B, 5.0, 0.3, 0.11))
    wander.fade(3)
    again.restore(wander.state())
    assert again == wander and again.state() == wander.state()
    again.restore(())
    assert again == ProcessNoise()
