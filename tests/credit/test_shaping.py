"""Shaping changes neither the sign of an advantage nor the order of the scores."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.schema import CreditSettings
from megatron_rl.contracts.group import Group, Verdict
from megatron_rl.credit.advantages import (
    TIED_SCALE,
    group_relative,
    shape_advantages,
    tied_advantages,
)
from megatron_rl.credit.assign import BatchCredit, Credit
from megatron_rl.credit.group_kinds import GroupKind, ScoredRollouts
from tests.support.groups import group, verdict


def test_correct_and_incorrect_by_hand() -> None:
    raw = np.array([1.5, 1.5, -0.5, -0.5])
    penalties = np.array([0.0, 1.0, 0.0, 0.4])
    advantages = shape_advantages(raw, raw, penalties, strength=0.5)
    np.testing.assert_allclose(advantages, [1.5, 0.75, -0.5, -0.6])


def test_levels_in_between_by_hand() -> None:
    """The distance to the next lower advantage limits a penalty: here 0.6, 0.8 (0.4) and 0.6."""
    raw = np.array([1.0, 0.4, -0.4, -1.0])
    advantages = shape_advantages(raw, raw, np.ones(4), strength=0.5)
    np.testing.assert_allclose(advantages, [0.7, 0.2, -0.6, -1.5])


CORRECTNESS = st.one_of(
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
    st.floats(-2, 3, allow_subnormal=False),
)
ROLLOUTS = st.lists(
    st.tuples(CORRECTNESS, st.floats(0, 1), st.integers(1, 100), st.floats(0, 0.98)), min_size=2
)


def make_group(rollouts: list[tuple[float, float, int, float]], weight: float) -> Group:
    """Group of rollouts given as (correctness, penalty, generated tokens, repetition)."""
    return group(
        *[
            Verdict(reward=score, correctness=score, penalty=penalty)
            for score, penalty, _, _ in rollouts
        ],
        num_generated=[tokens for _, _, tokens, _ in rollouts],
        repetition=[repetition for _, _, _, repetition in rollouts],
        weight=weight,
    )


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    rollouts=ROLLOUTS,
    strength=st.floats(0, 0.5),
    length=st.sampled_from([None, "buffer", "excess"]),
    normalize=st.booleans(),
    weight=st.sampled_from([1.0, 1.27, 2.0]),
)
def test_shaping_keeps_signs_and_order(
    rollouts: list[tuple[float, float, int, float]],
    strength: float,
    length: str | None,
    normalize: bool,
    weight: float,
) -> None:
    scores = [score for score, _, _, _ in rollouts]
    shaping = {"shaping": strength, "length": length, "repetition_ngram": 4}
    credit = Credit(
        GrpoSettings(normalize_std=normalize),
        CreditSettings(**shaping),  # type: ignore[arg-type]
        max_new_tokens=100,
    )
    advantages = credit.assign([make_group(rollouts, weight)]).advantages
    if len(set(scores)) < 2:
        assert advantages == ()
        return
    raw = group_relative(np.array(scores), normalize_std=normalize)
    np.testing.assert_array_equal(np.sign(advantages), np.sign(raw))
    for advantage, score in zip(advantages, scores, strict=True):
        for other_advantage, other_score in zip(advantages, scores, strict=True):
            if other_score < score:
                assert advantage >= other_advantage


@pytest.mark.parametrize("strength", [-0.1, 0.51])
def test_strength_out_of_range_is_refused(strength: float) -> None:
    with pytest.raises(ValueError, match=rf"strength={strength}: must be"):
        shape_advantages(np.ones(2), np.ones(2), np.zeros(2), strength=strength)


def assign(*groups: Group, **settings: object) -> BatchCredit:
    credit_settings = CreditSettings(**settings)  # type: ignore[arg-type]
    return Credit(GrpoSettings(), credit_settings, max_new_tokens=100).assign(groups)


def test_advantages_without_penalties_are_bit_identical_to_group_relative() -> None:
    scores = [1.0, 0.0, 0.3, 0.0, 0.7]
    assert list(assign(group(*scores)).advantages) == group_relative(np.array(scores)).tolist()


@pytest.mark.parametrize("rewards", [(1.0, -1.0, -1.0), (3.0, 0.9, 0.0), (1.0, -0.5, -0.5)])
def test_the_scale_of_rewards_is_no_penalty(rewards: tuple[float, float, float]) -> None:
    """DAPO's rewards of 1 and -1 train like 1 and 0."""
    scores = (1.0, 0.0, 0.0)
    scaled_group = group(
        *[verdict(c, reward=reward) for c, reward in zip(scores, rewards, strict=True)]
    )
    credit = assign(scaled_group)
    assert credit.advantages == assign(group(*scores)).advantages
    assert credit.metrics()["reward/shaping_share"] == 0.0


def test_penalties_of_the_scorer_shape_advantages() -> None:
    plain = assign(group(1.0, 1.0, 0.0, 0.0))
    penalised_group = group(verdict(1.0, penalty=0.4), 1.0, verdict(0.0, penalty=1.0), 0.0)
    factors = [1 - 0.5 * 0.4, 1.0, 1 + 0.5 * 1.0, 1.0]
    expected_advantages = [a * factor for a, factor in zip(plain.advantages, factors, strict=True)]
    assert assign(penalised_group).advantages == pytest.approx(expected_advantages)
    assert assign(penalised_group, shaping=0.0).advantages == plain.advantages
    # In units of one advantage: changes of 0.2 and 0.5, and sizes of 1, 1, 1.5 and 1
    share = assign(penalised_group).metrics()["reward/shaping_share"]
    assert share == pytest.approx(0.7 / 4.5)
    assert plain.metrics()["reward/shaping_share"] == 0.0


def test_length_penalises_correct_answers_and_repetition_incorrect_ones() -> None:
    long = group(
        1.0, 1.0, 0.0, 0.0, num_generated=[20, 95, 20, 95], repetition=[0.0, 0.5, 0.0, 0.5]
    )
    plain = assign(long).advantages
    # 95 tokens are three quarters into the buffer from 80 to 100.
    by_length = assign(long, length="buffer", length_start=20).advantages
    assert by_length == pytest.approx([plain[0], plain[1] * (1 - 0.5 * 0.75), plain[2], plain[3]])
    by_repetition = assign(long, repetition_ngram=4).advantages
    assert by_repetition == pytest.approx([*plain[:3], plain[3] * (1 + 0.5 * 0.5)])


def test_default_buffer_is_one_fifth_of_the_limit() -> None:
    long = group(1.0, 1.0, 0.0, num_generated=[80, 90, 3])
    plain = assign(long).advantages
    advantages = assign(long, length="buffer").advantages
    assert advantages == pytest.approx([plain[0], plain[1] * 0.75, plain[2]])


def test_excess_compares_with_the_median_of_correct_answers() -> None:
    # 1.5 times the median is 30 tokens. 45 tokens are half as long again.
    long = group(1.0, 1.0, 1.0, 0.0, num_generated=[10, 20, 45, 99])
    plain = assign(long).advantages
    advantages = assign(long, length="excess").advantages
    assert advantages == pytest.approx([plain[0], plain[1], plain[2] * 0.75, plain[3]])


def test_tied_advantages_by_hand() -> None:
    """The mean of the negated penalties 0, 0, 1 is -1/3, their standard deviation 0.577."""
    advantages = tied_advantages(np.array([0.0, 0.0, 1.0]))
    np.testing.assert_allclose(advantages, [0.057735, 0.057735, -0.1], atol=1e-5)
    advantages = tied_advantages(np.array([0.0, 0.2]))
    np.testing.assert_allclose(advantages, [0.1 * 0.1 / 0.25, -0.1 * 0.1 / 0.25])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=9))
def test_tied_advantages_are_bounded_and_ordered_by_penalty(penalties: list[float]) -> None:
    advantages = tied_advantages(np.array(penalties))
    assert np.abs(advantages).max() <= TIED_SCALE
    by_penalty = [advantage for _, advantage in sorted(zip(penalties, -advantages, strict=True))]
    assert by_penalty == sorted(by_penalty)


def test_tied_groups_are_extra_rollouts_if_enabled() -> None:
    correct = group(1.0, 1.0, name="a", num_generated=[20, 100])
    incorrect = group(0.0, 0.0, name="b", num_generated=[20, 100], repetition=[0.0, 0.9])
    penalties = {"length": "buffer", "repetition_ngram": 4}
    default_credit = assign(correct, incorrect, **penalties)
    assert default_credit.rollouts == ()
    assert default_credit.extra_rollouts == ()
    assert default_credit.kinds == (GroupKind.TIED_CORRECT, GroupKind.TIED_INCORRECT)
    assert default_credit.metrics()["rollout/zero_variance_rate"] == 1.0
    credit = assign(correct, incorrect, **penalties, tied="shape")
    assert [extra.rollout.rollout_id for extra in credit.extra_rollouts] == [
        "a/0",
        "a/1",
        "b/0",
        "b/1",
    ]
    assert all(extra.entropy_advantage == 0.0 for extra in credit.extra_rollouts)
    advantages = [extra.advantage for extra in credit.extra_rollouts]
    assert advantages[0] == -advantages[1] > 0
    assert advantages[2] == -advantages[3] > 0
    assert credit.metrics()["reward/shaping_share"] == 1.0


def test_treatment_of_all_correct_groups_does_not_apply_to_tied_groups() -> None:
    correct = group(1.0, 1.0, name="a", num_generated=[20, 100])
    assert assign(correct, length="buffer", all_correct="zvp").extra_rollouts == ()


ZERO_VARIANCE = (group(1.0, 1.0, name="c"), group(0.0, 0.0, name="i"))
MIXED = group(1.0, 0.0, name="m")


@pytest.mark.parametrize(
    "settings_", [{}, {"all_correct": "zvp", "all_incorrect": "zvp", "zvp_alpha": 0.0}]
)
def test_zero_variance_groups_are_dropped(settings_: dict[str, object]) -> None:
    credit = assign(*ZERO_VARIANCE, MIXED, **settings_)
    assert credit.advantages == assign(MIXED).advantages
    assert credit.extra_rollouts == ()
    assert credit.denominator_only == ()


def test_zero_variance_groups_train_by_entropy() -> None:
    credit = assign(*ZERO_VARIANCE, MIXED, all_correct="zvp", all_incorrect="zvp", zvp_alpha=0.2)
    extras = [
        (extra.rollout.prompt_id, extra.advantage, extra.entropy_advantage)
        for extra in credit.extra_rollouts
    ]
    assert extras == [("c", 0.0, 0.2), ("c", 0.0, 0.2), ("i", 0.0, -0.2), ("i", 0.0, -0.2)]
    assert credit.advantages == assign(MIXED).advantages


def test_zero_variance_groups_can_count_in_denominators_only() -> None:
    credit = assign(*ZERO_VARIANCE, MIXED, all_correct="keep", all_incorrect="zvp")
    assert [extra.rollout.prompt_id for extra in credit.denominator_only] == ["c", "c"]
    assert {extra.rollout.prompt_id for extra in credit.extra_rollouts} == {"i"}


def test_groups_without_correctness_compare_rewards_and_never_train_by_entropy() -> None:
    def with_rewards(*rewards: float) -> Group:
        return group(*[Verdict(reward=reward, correctness=None) for reward in rewards])

    credit = assign(
        with_rewards(0.2, 0.8), with_rewards(0.5, 0.5), all_correct="zvp", all_incorrect="zvp"
    )
    assert credit.advantages == tuple(group_relative(np.array([0.2, 0.8])).tolist())
    assert credit.extra_rollouts == ()
    assert credit.kinds == (GroupKind.MIXED, GroupKind.TIED_REWARD)


def test_rollouts_without_correctness_among_others_are_counted_and_left_out() -> None:
    partial = group(1.0, Verdict(reward=0.5, correctness=None), 0.0)
    credit = assign(partial)
    assert [rollout.sample_index for rollout in credit.rollouts] == [0, 2]
    assert credit.advantages == assign(group(1.0, 0.0)).advantages
    assert credit.metrics()["reward/no_correctness"] == 1.0
    assert ScoredRollouts.from_group(partial).has_correctness


def test_weight_multiplies_advantages() -> None:
    plain = assign(group(1.0, 0.5, 0.0)).advantages
    weighted_advantages = assign(group(1.0, 0.5, 0.0, weight=2.0)).advantages
    assert weighted_advantages == tuple(2 * advantage for advantage in plain)
    assert plain[1] == 0.0
