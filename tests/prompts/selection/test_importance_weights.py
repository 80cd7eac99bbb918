"""Weights of extended groups: the note's table, and all pilots enumerated."""

from itertools import combinations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.contracts.group import Verdict
from megatron_rl.prompts.selection.importance_weights import (
    effective_share,
    extension_weight,
    pilot_mixed_probability,
    pilot_unsolved_probability,
)
from tests.support.groups import group


def test_weights_of_a_probe_of_four_of_eight() -> None:
    found = [1 / pilot_mixed_probability([1.0] * k + [0.0] * (8 - k), 4) for k in range(1, 8)]
    assert found == pytest.approx([2, 14 / 11, 14 / 13, 35 / 34, 14 / 13, 14 / 11, 2])
    assert 1 / pilot_mixed_probability([1.0] + [0.0] * 7, 2) == pytest.approx(4), "at most N / n0"


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=9), st.integers(2, 9))
def test_the_probability_is_the_share_of_mixed_pilots(scores: list[float], pilot: int) -> None:
    pilot = min(pilot, len(scores))
    pilots = list(combinations(scores, pilot))
    assert pilot_mixed_probability(scores, pilot) == pytest.approx(
        sum(len(set(p)) > 1 for p in pilots) / len(pilots)
    )


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=9), st.integers(1, 9))
def test_the_probability_of_going_on_is_the_share_of_pilots_not_all_right(
    scores: list[float], pilot: int
) -> None:
    pilot = min(pilot, len(scores))
    pilots = list(combinations(scores, pilot))
    unsolved = sum(len(set(p)) > 1 or p[0] < 0.5 for p in pilots)
    assert pilot_unsolved_probability(scores, pilot) == pytest.approx(unsolved / len(pilots))


def test_weights_where_only_solved_pilots_stop() -> None:
    found = [1 / pilot_unsolved_probability([1.0] * k + [0.0] * (8 - k), 4) for k in range(8)]
    assert found == pytest.approx([1, 1, 1, 1, 70 / 69, 70 / 65, 70 / 55, 2]), (
        "a rare success is never scaled up"
    )
    drawn = group(1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0)
    assert extension_weight(drawn, 4, skip="all_correct") == pytest.approx(2)


@pytest.mark.parametrize("pilot", [-1, 0, 1, 4])
def test_a_pilot_that_cannot_be_mixed_is_refused(pilot: int) -> None:
    with pytest.raises(ValueError, match="2 <= pilot"):
        pilot_mixed_probability([0.0, 1.0, 1.0], pilot)


def test_rollouts_without_a_verdict_are_in_no_weight() -> None:
    drawn = group(
        1.0, None, 0.0, 0.0, 1.0, 0.0, None, 1.0
    )  # pilot: 3 of 6 verdicts, of which 3 are right
    assert extension_weight(drawn, 4, skip="zero_variance") == pytest.approx(1 / (1 - 2 / 20))
    reversed_order = msgspec.structs.replace(drawn, rollouts=drawn.rollouts[::-1])
    assert extension_weight(reversed_order, 4, skip="zero_variance") == extension_weight(
        drawn, 4, skip="zero_variance"
    )


def test_where_no_truth_is_known_the_weight_is_of_a_judges_rewards() -> None:
    judged = [
        Verdict(reward=reward, correctness=None)
        for reward in (0.1, 0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)
    ]
    for skip in (
        "zero_variance",
        "all_correct",
    ):  # a judge's tie is not extended either way, however low its reward
        assert extension_weight(group(*judged), 4, skip=skip) == pytest.approx(2.0)


@pytest.mark.parametrize("skip", ["zero_variance", "all_correct"])
def test_a_scorer_that_finds_the_truth_only_later_ends_nothing(skip: str) -> None:
    first = [Verdict(reward=reward, correctness=None) for reward in (0.0, 1.0, 0.0, 1.0)]
    assert extension_weight(group(*first, 1.0, 0.0, 0.0, 0.0), 4, skip=skip) == 1


def test_effective_share() -> None:
    assert effective_share([]) == effective_share([2.0, 2.0]) == 1
    assert effective_share([1.0, 3.0]) == pytest.approx(16 / 20)
