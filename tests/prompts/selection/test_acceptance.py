import math

import pytest

from megatron_rl.prompts.selection.acceptance import Acceptance, coin
from megatron_rl.prompts.selection.beliefs.arcsine import (
    all_correct_probability,
    all_incorrect_probability,
)

ACCEPTANCE = Acceptance(target=0.75, exponent=6, minimum=0.02)


@pytest.mark.parametrize(
    ("probability", "acceptance"),
    [(0.75, 1.0), (0.9, 1.0), (0.6, 0.8**6), (0.375, 0.02), (0.0, 0.02)],  # 0.5^6 = 0.0156
)
def test_acceptance_by_probability(probability: float, acceptance: float) -> None:
    assert ACCEPTANCE.probability(probability, 0) == pytest.approx(acceptance)


def test_default_accepts_a_pass_rate_of_one_tenth_at_least_every_other_time() -> None:
    mean = math.asin(math.sqrt(0.1))
    acceptances = []
    for index in range(251):
        belief = (mean, index / 1000, 8)
        mixed_probability = (
            1 - all_correct_probability(*belief) - all_incorrect_probability(*belief)
        )
        acceptances.append(Acceptance().probability(mixed_probability, 0))
    # V = 0: exp(-8 x 0.103521) = 0.436837, so u = 0.563160. The minimum is near V = 0.04.
    assert acceptances[0] == pytest.approx((0.56316 / 0.6) ** 5, abs=1e-4)
    assert 0.5 < min(acceptances) < 0.56


@pytest.mark.parametrize(("declines", "acceptance"), [(9, 0.02), (10, 0.5), (10_000, 0.5)])
def test_prompts_that_were_declined_in_ten_epochs_are_accepted_at_least_every_other_time(
    declines: int, acceptance: float
) -> None:
    assert ACCEPTANCE.probability(0.0, declines) == acceptance


def test_age_never_lowers_acceptance() -> None:
    assert ACCEPTANCE.probability(0.74, 100) == pytest.approx((0.74 / 0.75) ** 6)
    assert Acceptance(max_age_epochs=7, minimum=0.9).probability(0.0, 7) == 0.9


def test_coins_are_uniform_and_reproducible() -> None:
    coins = [coin(3, epoch, f"p{i}") for epoch in range(4) for i in range(2500)]
    assert coins == [coin(3, epoch, f"p{i}") for epoch in range(4) for i in range(2500)]
    assert len(set(coins)) == 10_000
    assert all(0 <= value < 1 for value in coins)
    for share in (0.02, 0.5, 0.9):
        assert sum(value < share for value in coins) / 10_000 == pytest.approx(share, abs=0.015)


def test_coins_depend_on_seed_and_epoch() -> None:
    assert coin(3, 1, "p") != coin(4, 1, "p") != coin(4, 2, "p")


def test_coins_accept_any_id() -> None:
    assert coin(0, 0, "\ud800") >= 0
