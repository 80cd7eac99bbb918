import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schema import CreditSettings
from megatron_rl.contracts.group import Verdict
from megatron_rl.credit.group_kinds import GroupKind, ScoredRollouts, kind_of
from megatron_rl.credit.penalties import Penalties
from tests.support.groups import group, verdict


@pytest.mark.parametrize(
    ("correctness", "kind"),
    [
        ([1, 0, 0], GroupKind.MIXED),
        ([1, 1, 1], GroupKind.ALL_CORRECT),
        ([0, 0], GroupKind.ALL_INCORRECT),
        ([0.5, 0.5], GroupKind.ALL_CORRECT),
        ([0.3, 0.3], GroupKind.ALL_INCORRECT),
        ([0.3, 0.4], GroupKind.MIXED),
        ([1, None, 0], GroupKind.MIXED),
        ([1, None, 1], GroupKind.ALL_CORRECT),
        ([1, None, None], GroupKind.TOO_FEW_VERDICTS),
        ([None, None], GroupKind.TOO_FEW_VERDICTS),
        ([], GroupKind.TOO_FEW_VERDICTS),
    ],
)
def test_kind_by_correctness(correctness: list[float | None], kind: GroupKind) -> None:
    assert kind_of(group(*map(verdict, correctness))) is kind


def test_shaped_rewards_do_not_affect_the_kind() -> None:
    different_rewards = group(verdict(0.0, reward=0.2), verdict(0.0, reward=-0.3))
    assert kind_of(different_rewards) is GroupKind.ALL_INCORRECT
    equal_rewards = group(verdict(1.0, reward=0.5), verdict(0.0, reward=0.5))
    assert kind_of(equal_rewards) is GroupKind.MIXED


def reward_only(reward: float) -> Verdict:
    return Verdict(reward=reward, correctness=None)


@pytest.mark.parametrize(
    ("verdicts", "kind"),
    [
        ([reward_only(0.3), reward_only(0.7)], GroupKind.MIXED),
        ([reward_only(0.3), reward_only(0.3)], GroupKind.TIED_REWARD),
        ([reward_only(1.0), reward_only(1.0), verdict(None)], GroupKind.TIED_REWARD),
        ([reward_only(0.3)], GroupKind.TOO_FEW_VERDICTS),
        # With a known correctness, rollouts that have only a reward do not count.
        ([reward_only(0.3), verdict(1.0), verdict(1.0)], GroupKind.ALL_CORRECT),
        ([reward_only(0.3), verdict(1.0)], GroupKind.TOO_FEW_VERDICTS),
        ([verdict(math.nan, reward=1.0), verdict(1.0), verdict(0.0)], GroupKind.MIXED),
        ([verdict(math.nan, reward=1.0), verdict(1.0), verdict(1.0)], GroupKind.ALL_CORRECT),
        (
            [verdict(math.inf, reward=1.0), verdict(math.nan, reward=1.0)],
            GroupKind.TOO_FEW_VERDICTS,
        ),
        ([verdict(1.0, reward=math.nan), verdict(0.0), verdict(0.0)], GroupKind.ALL_INCORRECT),
    ],
)
def test_rewards_count_only_without_any_correctness(
    verdicts: list[Verdict], kind: GroupKind
) -> None:
    assert kind_of(group(*verdicts)) is kind


def make_penalties(**settings: object) -> Penalties:
    return Penalties(CreditSettings(**settings), max_new_tokens=100)  # type: ignore[arg-type]


BUFFER_40 = {"length": "buffer", "length_start": 40}


@pytest.mark.parametrize(
    ("scores", "kind", "settings"),
    [
        ((1, 1), GroupKind.ALL_CORRECT, {}),
        # 89 tokens are 29 tokens into the buffer.
        ((1, 1), GroupKind.TIED_CORRECT, BUFFER_40),
        # The median is 50, so the penalty is 89 / 60 - 1.
        ((1, 1), GroupKind.TIED_CORRECT, {"length": "excess", "length_start": 1.2}),
        # 89 / 75 - 1 is below 0.2.
        ((1, 1), GroupKind.ALL_CORRECT, {"length": "excess"}),
        ((1, 1), GroupKind.ALL_CORRECT, {"repetition_ngram": 4}),
        ((0, 0), GroupKind.ALL_INCORRECT, BUFFER_40),
        ((0, 0), GroupKind.TIED_INCORRECT, {"repetition_ngram": 4}),
        ((1, 0), GroupKind.MIXED, {**BUFFER_40, "repetition_ngram": 4}),
    ],
)
def test_length_ties_correct_groups_and_repetition_incorrect_ones(
    scores: tuple[int, int], kind: GroupKind, settings: dict[str, object]
) -> None:
    different = group(*scores, num_generated=[11, 89], repetition=[0.1, 0.4])
    assert kind_of(different, make_penalties(**settings)) is kind
    similar = group(*scores, num_generated=[89, 89], repetition=[0.3, 0.4])
    assert kind_of(similar, make_penalties(**settings)) is kind_of(similar)


@pytest.mark.parametrize(
    ("difference", "correct_kind", "incorrect_kind"),
    [
        (0.2, GroupKind.TIED_CORRECT, GroupKind.TIED_INCORRECT),
        (0.19, GroupKind.ALL_CORRECT, GroupKind.ALL_INCORRECT),
    ],
)
def test_penalties_tie_a_group_from_a_difference_of_one_fifth(
    difference: float, correct_kind: GroupKind, incorrect_kind: GroupKind
) -> None:
    penalties = make_penalties(length="buffer", length_start=100, repetition_ngram=4)
    correct = group(1, 1, num_generated=[0, round(100 * difference)])
    incorrect = group(0, 0, repetition=[0.0, difference])
    assert kind_of(correct, penalties) is correct_kind
    assert kind_of(incorrect, penalties) is incorrect_kind


VERDICTS = st.builds(
    Verdict,
    reward=st.sampled_from([None, 0.0, 0.5, 1.0, math.nan]),
    correctness=st.sampled_from([None, 0.0, 0.25, 0.5, 1.0, math.nan]),
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(VERDICTS, max_size=5), st.integers(1, 100))
def test_every_group_has_one_kind_and_mixed_means_different_scores(
    verdicts: list[Verdict], longest: int
) -> None:
    lengths = [1 + i * (longest - 1) // 5 for i in range(len(verdicts))]
    random_group = group(*verdicts, num_generated=lengths)
    kind = kind_of(random_group, make_penalties(length="buffer", repetition_ngram=4))
    scores = ScoredRollouts.from_group(random_group).scores
    assert kind in GroupKind
    assert all(math.isfinite(score) for score in scores)
    assert (kind is GroupKind.MIXED) == (len(set(scores.tolist())) > 1)
    assert (kind is GroupKind.TOO_FEW_VERDICTS) == (len(scores) < 2)
