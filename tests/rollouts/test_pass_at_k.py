"""pass@k computed by hand, and by enumerating every choice of k responses."""

from itertools import combinations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.contracts.group import Group, Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.rollouts.evaluation.pass_at_k import mean_ci95, pass_at_k, pass_rates, powers_up_to
from tests.support.rollout_refs import make_ref
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


def test_pass_at_k_computed_by_hand() -> None:
    # 4 responses, 1 correct: 3 of the 6 pairs and 3 of the 4 triples hold it
    assert [pass_at_k(4, 1, k) for k in (1, 2, 3, 4)] == pytest.approx([1 / 4, 1 / 2, 3 / 4, 1])
    # 5 responses, 2 correct: C(3, 2) / C(5, 2) = 3 / 10 of the pairs hold no correct one
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)
    assert pass_at_k(8, 0, 4) == 0 and pass_at_k(8, 8, 1) == 1


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_choices_with_a_correct_response(
    is_correct: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(is_correct)))
    choices = list(combinations(is_correct, k))
    assert pass_at_k(len(is_correct), sum(is_correct), k) == pytest.approx(
        sum(map(any, choices)) / len(choices)
    )


def test_powers_of_two_up_to_the_number_of_samples() -> None:
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


def test_pass_rates_count_lost_and_half_correct_responses_as_failures() -> None:
    # 2 responses requested of each: both correct; one correct; one lost; one half correct
    rates = pass_rates([group(1, 1), group(1, 0), group(1), group(0.5, 0)], 2)
    assert rates.keys() == {1, 2}
    assert rates[1][0] == pytest.approx((1 + 0.5 + 0.5 + 0) / 4) and rates[2][0] == pytest.approx(
        3 / 4
    )
    assert rates[2][1] == pytest.approx(
        1.959964 * (0.25 / 4) ** 0.5
    )  # variance of 1, 1, 1, 0 is 1/4
