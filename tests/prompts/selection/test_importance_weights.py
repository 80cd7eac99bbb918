"""Importance weights of extended groups, by hand and by enumeration of all pilots."""

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
    pilot_not_all_correct_probability,
    stopped_weight,
)
from tests.support.groups import group


def scores_of(num_correct: int, count: int = 8) -> list[float]:
    return [1.0] * num_correct + [0.0] * (count - num_correct)


def test_weights_of_mixed_pilots_of_four_of_eight() -> None:
    weights = [1 / pilot_mixed_probability(scores_of(k), 4) for k in range(1, 8)]
    assert weights == pytest.approx([2, 14 / 11, 14 / 13, 35 / 34, 14 / 13, 14 / 11, 2])


def test_weight_is_at_most_the_ratio_of_group_and_pilot() -> None:
    assert 1 / pilot_mixed_probability(scores_of(1), 2) == pytest.approx(4)


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=9), st.integers(2, 9))
def test_mixed_probability_is_the_share_of_mixed_pilots(scores: list[float], pilot: int) -> None:
    pilot = min(pilot, len(scores))
    pilots = list(combinations(scores, pilot))
    share = sum(len(set(pilot_scores)) > 1 for pilot_scores in pilots) / len(pilots)
    assert pilot_mixed_probability(scores, pilot) == pytest.approx(share)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=9), st.integers(1, 9))
def test_not_all_correct_probability_is_the_share_of_such_pilots(
    scores: list[float], pilot: int
) -> None:
    pilot = min(pilot, len(scores))
    pilots = list(combinations(scores, pilot))
    count = sum(len(set(pilot_scores)) > 1 or pilot_scores[0] < 0.5 for pilot_scores in pilots)
    probability = pilot_not_all_correct_probability(scores, pilot)
    assert probability == pytest.approx(count / len(pilots))


def test_weights_if_only_all_correct_pilots_stop() -> None:
    weights = [1 / pilot_not_all_correct_probability(scores_of(k), 4) for k in range(8)]
    # Rare successes get no larger weight.
    assert weights == pytest.approx([1, 1, 1, 1, 70 / 69, 70 / 65, 70 / 55, 2])
    one_incorrect = group(1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0)
    assert extension_weight(one_incorrect, 4, skip="all_correct") == pytest.approx(2)


@pytest.mark.parametrize("pilot", [-1, 0, 1, 4])
def test_pilots_that_cannot_be_mixed_are_refused(pilot: int) -> None:
    with pytest.raises(ValueError, match=rf"pilot={pilot} .* 2 <= pilot"):
        pilot_mixed_probability([0.0, 1.0, 1.0], pilot)


def test_rollouts_without_verdict_do_not_affect_the_weight() -> None:
    # The pilot has 3 of 6 verdicts. 3 of the 6 are correct.
    with_gaps = group(1.0, None, 0.0, 0.0, 1.0, 0.0, None, 1.0)
    weight = extension_weight(with_gaps, 4, skip="zero_variance")
    assert weight == pytest.approx(1 / (1 - 2 / 20))
    reverse = msgspec.structs.replace(with_gaps, rollouts=with_gaps.rollouts[::-1])
    assert extension_weight(reverse, 4, skip="zero_variance") == weight


def reward_only(reward: float) -> Verdict:
    return Verdict(reward=reward, correctness=None)


@pytest.mark.parametrize("skip", ["zero_variance", "all_correct"])
def test_weight_without_correctness_is_that_of_rewards(skip: str) -> None:
    """Pilots with equal rewards are never extended, however low the rewards are."""
    rewards = (0.1, 0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)
    verdicts = [reward_only(reward) for reward in rewards]
    assert extension_weight(group(*verdicts), 4, skip=skip) == pytest.approx(2.0)


@pytest.mark.parametrize("skip", ["zero_variance", "all_correct"])
def test_weight_is_one_if_correctness_is_known_only_after_the_pilot(skip: str) -> None:
    pilot = [reward_only(reward) for reward in (0.0, 1.0, 0.0, 1.0)]
    assert extension_weight(group(*pilot, 1.0, 0.0, 0.0, 0.0), 4, skip=skip) == 1


@given(st.floats(0.05, 1), st.integers(1, 9), st.integers(0, 8))
def test_stopped_probes_have_the_expected_credit_of_whole_groups(
    pass_rate: float, probe: int, others: int
) -> None:
    """If the pass rate is known: P(probe) · n0 · w = P(group) · N."""
    size = probe + others
    weight = stopped_weight(pass_rate**probe, pass_rate**size, probe=probe, group_size=size)
    assert pass_rate**probe * probe * weight == pytest.approx(pass_rate**size * size)


def test_a_stopped_probe_that_was_believed_impossible_has_weight_zero() -> None:
    assert stopped_weight(0.0, 0.0, probe=4, group_size=8) == 0


@pytest.mark.parametrize("skip", ["zero_variance", "all_correct"])
def test_lost_verdicts_raise_the_bound_of_the_weight(skip: str) -> None:
    """The pilot of four has two verdicts, the group six: the weight is 3, more than 8 / 4."""
    with_gaps = group(None, 1.0, None, 1.0, 0.0, 1.0, 1.0, 1.0)
    assert extension_weight(with_gaps, 4, skip=skip) == pytest.approx(3)


@given(st.lists(st.sampled_from([0.0, 0.6, 1.0]), min_size=2, max_size=9), st.integers(2, 9))
def test_weights_of_mixed_groups_are_at_most_the_ratio_of_group_and_pilot(
    scores: list[float], pilot: int
) -> None:
    pilot = min(pilot, len(scores))
    if len(set(scores)) > 1:
        bound = len(scores) / pilot + 1e-9
        assert 1 <= 1 / pilot_mixed_probability(scores, pilot) <= bound
        assert 1 <= 1 / pilot_not_all_correct_probability(scores, pilot) <= bound


@pytest.mark.parametrize(
    ("weights", "share"), [([], 1.0), ([2.0, 2.0], 1.0), ([1.0, 3.0], 16 / 20)]
)
def test_effective_share(weights: list[float], share: float) -> None:
    assert effective_share(weights) == pytest.approx(share)
