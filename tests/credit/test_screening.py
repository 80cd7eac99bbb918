"""Screening with a pilot: its probability of being mixed, and the weight that makes up for stopped prompts."""

import itertools
from fractions import Fraction
from math import comb

import pytest

from megatron_rl.credit.screening import mixed_probability, screening_weight


def test_the_weights_of_four_then_eight() -> None:
    weights = [screening_weight(right, 8, 4) for right in range(1, 8)]
    assert [round(weight, 2) for weight in weights] == [2.0, 1.27, 1.08, 1.03, 1.08, 1.27, 2.0]


@pytest.mark.parametrize(("drawn", "pilot"), [(6, 2), (7, 3), (8, 4)])
def test_the_probability_counts_the_pilots(drawn: int, pilot: int) -> None:
    for right in range(drawn + 1):
        samples = [1] * right + [0] * (drawn - right)
        mixed = [len(set(chosen)) == 2 for chosen in itertools.combinations(samples, pilot)]
        assert mixed_probability(right, drawn, pilot) == pytest.approx(sum(mixed) / len(mixed), abs=1e-15)
        if 0 < right < drawn:
            assert 1.0 <= screening_weight(right, drawn, pilot) <= drawn / pilot + 1e-12


def test_weighted_screening_has_the_expected_gradient_of_drawing_all() -> None:
    """Exactly, for solve rates of 1/10 and 1/2 and advantages (c - mean) / std, whose sum over right ones is S(k).

    The expected gradient is E[S] times grad p up to a constant; the weight and the pilot's probability cancel.
    """
    drawn, pilot = 8, 4
    for rate in (Fraction(1, 10), Fraction(1, 2)):
        whole = screened = 0.0
        for right in range(1, drawn):
            chance = float(comb(drawn, right) * rate**right * (1 - rate) ** (drawn - right))
            mean = right / drawn
            size = right * (1 - mean) / (mean * (1 - mean)) ** 0.5
            whole += chance * size
            extended = chance * mixed_probability(right, drawn, pilot)
            screened += extended * screening_weight(right, drawn, pilot) * size
        assert screened == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(("right", "drawn", "pilot"), [(0, 8, 4), (8, 8, 4)])
def test_flat_groups_have_no_weight(right: int, drawn: int, pilot: int) -> None:
    assert mixed_probability(right, drawn, pilot) == 0.0
    with pytest.raises(ValueError, match="no pilot of 4 is mixed"):
        screening_weight(right, drawn, pilot)


@pytest.mark.parametrize(("right", "drawn", "pilot"), [(1, 8, 1), (1, 8, 9), (-1, 8, 4), (9, 8, 4)])
def test_numbers_that_cannot_be_are_refused(right: int, drawn: int, pilot: int) -> None:
    with pytest.raises(ValueError, match="2 <= pilot <= drawn"):
        mixed_probability(right, drawn, pilot)
