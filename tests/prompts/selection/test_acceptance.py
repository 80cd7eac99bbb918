import numpy as np
import pytest

from megatron_rl.config.schema import SelectionExpertSettings, SelectionSettings
from megatron_rl.prompts.selection.acceptance import acceptance, coin
from megatron_rl.prompts.selection.arcsine import chance_of_mixed

SETTINGS = SelectionSettings(
    name="belief",
    expert=SelectionExpertSettings(
        acceptance_target=0.75, acceptance_exponent=6, min_acceptance=0.02
    ),
)


def test_a_prompt_is_taken_by_its_chance_of_a_mixed_group() -> None:
    assert acceptance(0.75, 0, SETTINGS) == acceptance(0.9, 0, SETTINGS) == 1
    assert acceptance(0.6, 0, SETTINGS) == pytest.approx(0.8**6)
    assert (
        acceptance(0.375, 0, SETTINGS) == 0.02 and acceptance(0.0, 0, SETTINGS) == 0.02
    )  # 0.5^6 = 0.0156


def test_by_default_a_prompt_that_is_right_one_time_in_ten_is_taken_at_least_every_other_time() -> (
    None
):
    variances = np.linspace(0, 0.25, 251)
    chances = chance_of_mixed(np.full(251, np.arcsin(np.sqrt(0.1))), variances, 8)
    # V = 0: exp(-8 x 0.103521) = 0.436837, so u = 0.563160 and (u / 0.6)^5; least where V is near
    # 0.04
    assert acceptance(float(chances[0]), 0, SelectionSettings()) == pytest.approx(
        (0.56316 / 0.6) ** 5, abs=1e-4
    )
    assert 0.5 < min(acceptance(float(u), 0, SelectionSettings()) for u in chances) < 0.56


def test_a_prompt_that_was_not_drawn_for_long_is_taken_every_other_time() -> None:
    assert [acceptance(0.0, unseen, SETTINGS) for unseen in (99, 100, 10_000)] == [0.02, 0.5, 0.5]
    assert acceptance(0.74, 100, SETTINGS) == pytest.approx((0.74 / 0.75) ** 6)
    assert (
        acceptance(
            0.0,
            7,
            SelectionSettings(
                name="belief", expert=SelectionExpertSettings(max_age_steps=7, min_acceptance=0.9)
            ),
        )
        == 0.9
    )


def test_coins_are_fair_and_fall_the_same_again() -> None:
    coins = [coin(3, epoch, f"p{i}") for epoch in range(4) for i in range(2500)]
    assert coins == [coin(3, epoch, f"p{i}") for epoch in range(4) for i in range(2500)]
    assert len(set(coins)) == 10_000 and all(0 <= c < 1 for c in coins)
    for share in (0.02, 0.5, 0.9):
        assert sum(c < share for c in coins) / 10_000 == pytest.approx(share, abs=0.015)
    assert coin(3, 1, "p") != coin(4, 1, "p") != coin(4, 2, "p") and coin(0, 0, "\ud800") >= 0
