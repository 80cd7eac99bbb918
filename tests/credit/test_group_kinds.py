import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schema import CreditSettings
from megatron_rl.contracts.group import Verdict
from megatron_rl.credit.group_kinds import Kind, ScoredRollouts, kind_of
from megatron_rl.credit.penalties import Penalties
from tests.support.groups import group, verdict


@pytest.mark.parametrize(
    ("correctness", "kind"),
    [
        ([1, 0, 0], Kind.MIXED),
        ([1, 1, 1], Kind.ALL_CORRECT),
        ([0, 0], Kind.ALL_INCORRECT),
        ([0.3, 0.3], Kind.ALL_INCORRECT),
        ([0.3, 0.4], Kind.MIXED),
        ([1, None, 0], Kind.MIXED),
        ([1, None, 1], Kind.ALL_CORRECT),
        ([1, None, None], Kind.TOO_FEW_VERDICTS),
        ([None, None], Kind.TOO_FEW_VERDICTS),
        ([], Kind.TOO_FEW_VERDICTS),
    ],
)
def test_kinds(correctness: list[float | None], kind: Kind) -> None:
    assert kind_of(group(*map(verdict, correctness))) is kind


def test_shaping_never_decides() -> None:
    shaped_apart = group(verdict(0.0, reward=0.2), verdict(0.0, reward=-0.3))
    assert kind_of(shaped_apart) is Kind.ALL_INCORRECT
    shaped_together = group(verdict(1.0, reward=0.5), verdict(0.0, reward=0.5))
    assert kind_of(shaped_together) is Kind.MIXED


def judged(reward: float) -> Verdict:
    return Verdict(reward=reward, correctness=None)


@pytest.mark.parametrize(
    ("verdicts", "kind"),
    [
        ([judged(0.3), judged(0.7)], Kind.MIXED),
        ([judged(0.3), judged(0.3)], Kind.TIED_REWARD),
        ([judged(1.0), judged(1.0), verdict(None)], Kind.TIED_REWARD),
        ([judged(0.3)], Kind.TOO_FEW_VERDICTS),
        (
            [judged(0.3), verdict(1.0), verdict(1.0)],
            Kind.ALL_CORRECT,
        ),  # the truth is known: the judge's word is none
        ([judged(0.3), verdict(1.0)], Kind.TOO_FEW_VERDICTS),
        ([verdict(math.nan, reward=1.0), verdict(1.0), verdict(0.0)], Kind.MIXED),
        ([verdict(math.nan, reward=1.0), verdict(1.0), verdict(1.0)], Kind.ALL_CORRECT),
        ([verdict(math.inf, reward=1.0), verdict(math.nan, reward=1.0)], Kind.TOO_FEW_VERDICTS),
        ([verdict(1.0, reward=math.nan), verdict(0.0), verdict(0.0)], Kind.ALL_INCORRECT),
    ],
)
def test_a_judges_reward_counts_only_where_no_truth_is_known(
    verdicts: list[Verdict], kind: Kind
) -> None:
    assert kind_of(group(*verdicts)) is kind


def penalties(**settings: object) -> Penalties:
    return Penalties(CreditSettings(**settings), max_new_tokens=100)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scores", "kind", "switched_on"),
    [
        ((1, 1), Kind.ALL_CORRECT, {}),
        (
            (1, 1),
            Kind.TIED_CORRECT,
            {"length": "buffer", "length_buffer": 40},
        ),  # 89 tokens are 29 into the buffer
        (
            (1, 1),
            Kind.TIED_CORRECT,
            {"length": "excess", "length_excess": 1.2},
        ),  # the median is 50: 89 / 60 - 1
        ((1, 1), Kind.ALL_CORRECT, {"length": "excess"}),  # 89 / 75 - 1 is below 0.2
        ((1, 1), Kind.ALL_CORRECT, {"repetition_ngram": 4}),
        ((0, 0), Kind.ALL_INCORRECT, {"length": "buffer", "length_buffer": 40}),
        ((0, 0), Kind.TIED_INCORRECT, {"repetition_ngram": 4}),
        ((1, 0), Kind.MIXED, {"length": "buffer", "length_buffer": 40, "repetition_ngram": 4}),
    ],
)
def test_only_lengths_tie_right_groups_and_only_repetition_wrong_ones(
    scores: tuple[int, int], kind: Kind, switched_on: dict[str, object]
) -> None:
    apart = group(*scores, num_generated=[11, 89], repetition=[0.1, 0.4])
    assert kind_of(apart, penalties(**switched_on)) is kind
    alike = group(*scores, num_generated=[89, 89], repetition=[0.3, 0.4])
    assert kind_of(alike, penalties(**switched_on)) is kind_of(alike)


@pytest.mark.parametrize(
    ("apart", "right", "wrong"),
    [
        (0.2, Kind.TIED_CORRECT, Kind.TIED_INCORRECT),
        (0.19, Kind.ALL_CORRECT, Kind.ALL_INCORRECT),
    ],
)
def test_a_group_is_tied_from_a_difference_of_a_fifth_on(
    apart: float, right: Kind, wrong: Kind
) -> None:
    on = penalties(length="buffer", length_buffer=100, repetition_ngram=4)
    assert kind_of(group(1, 1, num_generated=[0, round(100 * apart)]), on) is right
    assert kind_of(group(0, 0, repetition=[0.0, apart]), on) is wrong


VERDICTS = st.builds(
    Verdict,
    reward=st.sampled_from([None, 0.0, 0.5, 1.0, math.nan]),
    correctness=st.sampled_from([None, 0.0, 0.25, 0.5, 1.0, math.nan]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(VERDICTS, max_size=5), st.integers(1, 100))
def test_every_group_is_of_one_kind_and_mixed_means_that_scores_differ(
    verdicts: list[Verdict], longest: int
) -> None:
    drawn = group(*verdicts, num_generated=[1 + i * (longest - 1) // 5 for i in range(len(verdicts))])
    kind = kind_of(drawn, penalties(length="buffer", repetition_ngram=4))
    scores = ScoredRollouts.of(drawn).scores
    assert kind in Kind
    assert all(math.isfinite(score) for score in scores)
    assert (kind is Kind.MIXED) == (len(set(scores.tolist())) > 1)
    assert (kind is Kind.TOO_FEW_VERDICTS) == (len(scores) < 2)
