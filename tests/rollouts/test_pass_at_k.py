"""pass@k by hand, and against every way to draw k responses."""

from itertools import combinations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.testbed.rollout_refs import make_ref
from megatron_rl.contracts.group import Group, Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.rollouts.pass_at_k import mean_ci95, pass_at_k, pass_rates, powers_up_to
from tests.support.rollouts import make_rollout


def group(*correct: float) -> Group:
    base = make_ref(make_rollout(2, 2))
    rollouts = tuple(
        msgspec.structs.replace(base, verdict=Verdict(reward=value, correctness=value, answer="1"))
        for value in correct
    )
    return Group(
        group_id="g", prompt=Prompt(id="p", token_ids=(1,), answer="1", task="t"), rollouts=rollouts
    )


def test_by_hand() -> None:
    # 4 responses, 1 right: of the 6 pairs 3 hold it; of the 4 triples 3 do
    assert [pass_at_k(4, 1, k) for k in (1, 2, 3, 4)] == pytest.approx([1 / 4, 1 / 2, 3 / 4, 1])
    # 5 responses, 2 right: C(3, 2) / C(5, 2) = 3 / 10 of the pairs are wrong
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)
    assert pass_at_k(8, 0, 4) == 0 and pass_at_k(8, 8, 1) == 1


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_it_is_the_share_of_all_draws_that_hold_a_right_one(
    right: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(right)))
    draws = list(combinations(right, k))
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_powers_as_far_as_the_samples_go() -> None:
    assert [powers_up_to(n) for n in (1, 2, 3, 4, 9)] == [
        [1],
        [1, 2],
        [1, 2],
        [1, 2, 4],
        [1, 2, 4, 8],
    ]


def test_intervals_are_over_questions() -> None:
    # means 1, 1/2, 0: variance 1/4, 1.959964 * sqrt(1 / 12) = 0.565793
    assert mean_ci95([1.0, 0.5, 0.0]) == pytest.approx((0.5, 0.565793), abs=1e-6)
    assert mean_ci95([0.25]) == (0.25, 0.0)


def test_rates_of_groups_count_lost_and_half_right_responses_as_wrong() -> None:
    # two responses were asked for: both right; one right; one right and one lost; one half right
    rates = pass_rates([group(1, 1), group(1, 0), group(1), group(0.5, 0)], 2)
    assert rates.keys() == {1, 2}
    assert rates[1][0] == pytest.approx((1 + 0.5 + 0.5 + 0) / 4) and rates[2][0] == pytest.approx(
        3 / 4
    )
    assert rates[2][1] == pytest.approx(
        1.959964 * (0.25 / 4) ** 0.5
    )  # variance of 1, 1, 1, 0 is 1/4
