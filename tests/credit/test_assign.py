"""Credit of batches: which rollouts train, and metrics."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.algorithms import AlgoSettings, GrpoSettings, SftSettings
from megatron_rl.contracts.group import Group
from megatron_rl.credit.assign import BatchCredit, Credit
from megatron_rl.credit.group_kinds import GroupKind, kind_of
from tests.support.groups import group, verdict


def assign(groups: list[Group], algo: AlgoSettings | None = None) -> BatchCredit:
    return Credit(algo or GrpoSettings()).assign(groups)


def test_rollouts_without_verdict_do_not_affect_advantages() -> None:
    with_gap = assign([group(1.0, None, 0.0, 0.0, name="a")])
    without_gap = assign([group(1.0, 0.0, 0.0, name="a")])
    assert [r.sample_index for r in with_gap.rollouts] == [0, 2, 3]
    assert with_gap.advantages == without_gap.advantages


def test_zero_variance_groups_and_too_few_verdicts_are_left_out() -> None:
    batch = [
        group(1.0, None, name="a"),
        group(0.0, 1.0, name="b"),
        group(None, None, name="c"),
        group(name="d"),
        group(1.0, 1.0, name="e"),
    ]
    credit = assign(batch)
    assert [r.rollout_id for r in credit.rollouts] == ["b/0", "b/1"]
    assert credit.advantages == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)], abs=1e-5)


def test_advantages_belong_to_their_rollouts() -> None:
    credit = assign([group(0.0, 0.0, 1.0, name="a"), group(1.0, 0.0, 0.0, name="b")])
    pairs = zip(credit.rollouts, credit.advantages, strict=True)
    assert [rollout.rollout_id for rollout, advantage in pairs if advantage > 0] == ["a/2", "b/0"]


def test_groups_do_not_affect_each_other() -> None:
    first = group(1.0, 0.0, name="a")
    second = group(5.0, 9.0, 1.0, name="b")
    together = assign([first, second]).advantages
    assert together == assign([first]).advantages + assign([second]).advantages


def test_shaped_rewards_do_not_make_a_group_train() -> None:
    equal_correctness = group(verdict(0.0, reward=0.2), verdict(0.0, reward=-0.3))
    assert assign([equal_correctness]).rollouts == ()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, None]), max_size=5), max_size=12))
def test_kind_counts_sum_to_groups(batch: list[list[float | None]]) -> None:
    groups = [group(*scores, name=str(i)) for i, scores in enumerate(batch)]
    credit = assign(groups)
    assert sum(credit.kind_counts.values()) == len(groups)
    assert set(credit.kind_counts) == set(GroupKind)
    mixed_ids = {g.group_id for g in groups if kind_of(g) is GroupKind.MIXED}
    assert {rollout.prompt_id for rollout in credit.rollouts} == mixed_ids


def test_zero_variance_rate_by_hand() -> None:
    scores = [(1, 0), (1, 1), (0, 0), (0, 0), (1, None)]
    metrics = assign([group(*group_scores) for group_scores in scores]).metrics()
    # Three of the four groups with two verdicts have no variance.
    assert metrics["rollout/zero_variance_rate"] == 3 / 4
    assert metrics["rollout/groups/mixed"] == 1
    assert metrics["rollout/groups/too_few_verdicts"] == 1
    assert assign([]).metrics()["rollout/zero_variance_rate"] == 0.0


def test_demonstrations_have_advantage_one() -> None:
    groups = [group(1.0, name="a"), group(1.0, None, name="b")]
    credit = Credit(SftSettings(), compares_groups=False).assign(groups)
    assert [r.rollout_id for r in credit.rollouts] == ["a/0", "b/0"]
    assert credit.advantages == (1.0, 1.0)


def test_advantages_without_normalisation_are_differences_from_the_mean() -> None:
    credit = assign([group(3.0, 1.0, 2.0)], GrpoSettings(normalize_std=False))
    assert credit.advantages == (1.0, -1.0, 0.0)
