"""Shaping can neither change a sign nor put a less right answer above a more right one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.schema import CreditSettings
from megatron_rl.contracts.group import Verdict
from megatron_rl.credit.advantages import group_relative, shaped, tied
from megatron_rl.credit.assign import BatchCredit, Credit
from megatron_rl.credit.group_kinds import Kind, ScoredRollouts
from tests.support.groups import group, verdict


def test_right_and_wrong_by_hand() -> None:
    raw = np.array([1.5, 1.5, -0.5, -0.5])
    np.testing.assert_allclose(
        shaped(raw, raw, np.array([0.0, 1.0, 0.0, 0.4]), strength=0.5), [1.5, 0.75, -0.5, -0.6]
    )


def test_levels_in_between_by_hand() -> None:
    """A step down to the next level bounds what a penalty takes: 1.0 to 0.4, 0.4 to -0.4, then -0.4
    to -1.0.
    """
    raw = np.array([1.0, 0.4, -0.4, -1.0])
    np.testing.assert_allclose(shaped(raw, raw, np.ones(4), strength=0.5), [0.7, 0.2, -0.6, -1.5])


CORRECTNESS = st.one_of(
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
    st.floats(-2, 3, allow_subnormal=False),
)
ROLLOUTS = st.lists(
    st.tuples(CORRECTNESS, st.floats(-3, 3), st.integers(1, 100), st.floats(0, 0.98)), min_size=2
)


@settings(max_examples=400, deadline=None)
@given(
    rollouts=ROLLOUTS,
    strength=st.floats(0, 0.5),
    length=st.sampled_from([None, "buffer", "excess"]),
    normalize=st.booleans(),
    weight=st.sampled_from([1.0, 1.27, 2.0]),
)
def test_no_reorder(
    rollouts: list[tuple[float, float, int, float]],
    strength: float,
    length: str | None,
    normalize: bool,
    weight: float,
) -> None:
    scores, rewards, tokens, repeated = (list(column) for column in zip(*rollouts, strict=True))
    verdicts = [
        Verdict(reward=reward, correctness=score)
        for score, reward in zip(scores, rewards, strict=True)
    ]
    drawn = group(*verdicts, num_generated=tokens, repetition=repeated, weight=weight)
    settings_ = CreditSettings(shaping=strength, length=length, repetition_ngram=4)  # type: ignore[arg-type]
    credit = Credit(GrpoSettings(normalize_std=normalize), settings_, seed=0, max_new_tokens=100)
    advantages = credit.assign(1, [drawn]).advantages
    if len(set(scores)) < 2:
        assert advantages == ()
        return
    raw = group_relative(np.array(scores), normalize_std=normalize)
    for i, (own, score) in enumerate(zip(advantages, scores, strict=True)):
        assert np.sign(own) == np.sign(raw[i]), "no sign changes"
        for other, lower in zip(advantages, scores, strict=True):
            if lower < score:
                assert own >= other, "a more right answer is never below a less right one"


@pytest.mark.parametrize("strength", [-0.1, 0.51])
def test_a_strength_that_could_reorder_is_refused(strength: float) -> None:
    with pytest.raises(ValueError, match="strength"):
        shaped(np.array([1.0, -1.0]), np.array([1.0, 0.0]), np.zeros(2), strength=strength)


def assign(*groups: object, **settings_: object) -> BatchCredit:
    credit = Credit(GrpoSettings(), CreditSettings(**settings_), seed=0, max_new_tokens=100)  # type: ignore[arg-type]
    return credit.assign(1, groups)  # type: ignore[arg-type]


def test_without_penalties_advantages_are_the_statistics_bit_for_bit() -> None:
    scores = [1.0, 0.0, 0.3, 0.0, 0.7]
    assert list(assign(group(*scores)).advantages) == group_relative(np.array(scores)).tolist()


def test_statistics_are_over_correctness_and_a_reward_above_it_changes_nothing() -> None:
    generous = group(verdict(1.0, reward=3.0), verdict(0.0, reward=0.9), verdict(0.0))
    assert assign(generous).advantages == assign(group(1.0, 0.0, 0.0)).advantages


def test_a_reward_below_correctness_is_a_penalty() -> None:
    plain, fined = (
        assign(group(1.0, 1.0, 0.0, 0.0)),
        group(verdict(1.0, reward=0.6), 1.0, verdict(0.0, reward=-9.0), 0.0),
    )
    factors = [1 - 0.5 * 0.4, 1.0, 1 + 0.5 * 1.0, 1.0]
    expected = [a * factor for a, factor in zip(plain.advantages, factors, strict=True)]
    assert assign(fined).advantages == pytest.approx(expected)
    assert assign(fined, shaping=0.0).advantages == plain.advantages
    # of 2 (0.8 + 1 + 1.5 + 1) / 4 in units of one advantage: 0.2 and 0.5 moved, the larger ones are
    # 1, 1, 1.5 and 1
    assert assign(fined).metrics()["reward/shaping_share"] == pytest.approx(0.7 / 4.5)
    assert plain.metrics()["reward/shaping_share"] == 0.0


def test_length_is_a_matter_of_right_answers_and_repetition_of_wrong_ones() -> None:
    long = group(1.0, 1.0, 0.0, 0.0, num_generated=[20, 95, 20, 95], repetition=[0.0, 0.5, 0.0, 0.5])
    plain = assign(long).advantages
    by_length = assign(
        long, length="buffer", length_buffer=20
    ).advantages  # 95 is three quarters into 80..100
    assert by_length == pytest.approx([plain[0], plain[1] * (1 - 0.5 * 0.75), plain[2], plain[3]])
    by_repetition = assign(long, repetition_ngram=4).advantages
    assert by_repetition == pytest.approx(
        [plain[0], plain[1], plain[2], plain[3] * (1 + 0.5 * 0.5)]
    )


def test_the_buffer_is_a_fifth_of_the_longest_response_unless_told_otherwise() -> None:
    drawn = group(1.0, 1.0, 0.0, num_generated=[80, 90, 3])
    plain, found = assign(drawn).advantages, assign(drawn, length="buffer").advantages
    assert found == pytest.approx([plain[0], plain[1] * 0.75, plain[2]])


def test_excess_is_over_the_median_of_the_right_answers() -> None:
    drawn = group(
        1.0, 1.0, 1.0, 0.0, num_generated=[10, 20, 45, 99]
    )  # 1.5 x 20 = 30; 45 is half as long again
    plain, found = assign(drawn).advantages, assign(drawn, length="excess").advantages
    assert found == pytest.approx([plain[0], plain[1], plain[2] * 0.75, plain[3]])


def test_tied_by_hand() -> None:
    """Penalties 0, 0, 1: merits' mean -1/3, their deviation 0.577."""
    np.testing.assert_allclose(
        tied(np.array([0.0, 0.0, 1.0]), scale=0.1), [0.057735, 0.057735, -0.1], atol=1e-5
    )
    np.testing.assert_allclose(
        tied(np.array([0.0, 0.2]), scale=0.1), [0.1 * 0.1 / 0.25, -0.1 * 0.1 / 0.25]
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=9), st.floats(0.01, 0.1))
def test_tied_advantages_are_small_and_follow_the_penalties(
    penalties: list[float], scale: float
) -> None:
    found = tied(np.array(penalties), scale=scale)
    assert np.abs(found).max() <= scale
    for a, x in zip(found, penalties, strict=True):
        assert all(a >= b for b, y in zip(found, penalties, strict=True) if x < y)


def test_tied_groups_train_uncounted_and_only_when_asked_for() -> None:
    right = group(1.0, 1.0, name="a", num_generated=[20, 100])
    wrong = group(0.0, 0.0, name="b", num_generated=[20, 100], repetition=[0.0, 0.9])
    on = {"length": "buffer", "repetition_ngram": 4}
    dropped = assign(right, wrong, **on)
    assert (dropped.rollouts, dropped.uncounted) == ((), ())
    assert dropped.each == (Kind.TIED_CORRECT, Kind.TIED_INCORRECT)
    assert dropped.metrics()["rollout/zero_variance_rate"] == 1.0
    found = assign(right, wrong, **on, tied_correct="shape", tied_incorrect="shape")
    assert [(u.rollout.rollout_id, u.entropy_advantage) for u in found.uncounted] == [
        ("a/0", 0.0),
        ("a/1", 0.0),
        ("b/0", 0.0),
        ("b/1", 0.0),
    ]
    advantages = [u.advantage for u in found.uncounted]
    assert advantages[0] == -advantages[1] > 0 and advantages[2] == -advantages[3] > 0
    assert found.metrics()["reward/shaping_share"] == 1.0
    # one key, one treatment: what is tied is not flat, whatever flat groups get
    assert assign(right, **on, all_correct="zvp").uncounted == ()


def test_flat_groups_are_dropped_trained_by_entropy_or_kept() -> None:
    flat = (group(1.0, 1.0, name="r"), group(0.0, 0.0, name="w"), group(1.0, 0.0, name="m"))
    mixed = assign(flat[2])
    for settings_ in ({}, {"all_correct": "zvp", "all_incorrect": "zvp", "zvp_alpha": 0.0}):
        dropped = assign(*flat, **settings_)
        assert (dropped.advantages, dropped.uncounted, dropped.kept) == (mixed.advantages, (), ())
    trained = assign(*flat, all_correct="zvp", all_incorrect="zvp", zvp_alpha=0.2)
    assert [(u.rollout.prompt_id, u.advantage, u.entropy_advantage) for u in trained.uncounted] == [
        ("r", 0.0, 0.2),
        ("r", 0.0, 0.2),
        ("w", 0.0, -0.2),
        ("w", 0.0, -0.2),
    ]
    assert trained.advantages == mixed.advantages, "flat kinds never enter mixed statistics"
    kept = assign(*flat, all_correct="keep", all_incorrect="zvp")
    assert [r.prompt_id for r in kept.kept] == ["r", "r"]
    assert {u.rollout.prompt_id for u in kept.uncounted} == {"w"}


def test_judged_groups_are_compared_by_reward_without_shaping_and_never_by_entropy() -> None:
    def judged(*rewards: float) -> tuple[Verdict, ...]:
        return tuple(Verdict(reward=reward, correctness=None) for reward in rewards)

    found = assign(
        group(*judged(0.2, 0.8)), group(*judged(0.5, 0.5)), all_correct="zvp", all_incorrect="zvp"
    )
    assert found.advantages == tuple(group_relative(np.array([0.2, 0.8])).tolist())
    assert found.uncounted == () and found.each == (Kind.MIXED, Kind.TIED_REWARD)


def test_a_rollout_without_the_truth_that_others_have_is_counted_and_left_out() -> None:
    odd = group(1.0, Verdict(reward=0.5, correctness=None), 0.0)
    found = assign(odd)
    assert [r.sample_index for r in found.rollouts] == [0, 2]
    assert found.advantages == assign(group(1.0, 0.0)).advantages
    assert found.metrics()["reward/no_correctness"] == 1.0
    assert ScoredRollouts.of(odd).has_truth


def test_a_groups_weight_multiplies_its_advantages() -> None:
    plain = assign(group(1.0, 0.5, 0.0))
    assert assign(group(1.0, 0.5, 0.0, weight=2.0)).advantages == tuple(
        2 * a for a in plain.advantages
    )
    assert plain.advantages[1] == 0.0
