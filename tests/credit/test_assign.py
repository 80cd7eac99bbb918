import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.algorithms import AlgoSettings, GrpoSettings, SftSettings
from megatron_rl.contracts.group import Group
from megatron_rl.credit.assign import BatchCredit, Credit
from megatron_rl.credit.group_kinds import Kind, kind_of
from tests.support.groups import group, verdict


def credit(groups: list[Group], algo: AlgoSettings | None = None) -> BatchCredit:
    return Credit(algo or GrpoSettings(), seed=0).assign(1, groups)


def test_rollouts_without_a_verdict_neither_get_nor_influence_advantages() -> None:
    with_gap = credit([group(1.0, None, 0.0, 0.0, name="a")])
    without = credit([group(1.0, 0.0, 0.0, name="a")])
    assert [r.sample_index for r in with_gap.rollouts] == [0, 2, 3]
    assert with_gap.advantages == without.advantages


def test_flat_groups_and_groups_with_fewer_than_two_verdicts_are_left_out() -> None:
    batch = [
        group(1.0, None, name="a"),
        group(0.0, 1.0, name="b"),
        group(None, None, name="c"),
        group(name="d"),
    ]
    credited = credit([*batch, group(1.0, 1.0, name="e")])
    assert [r.rollout_id for r in credited.rollouts] == ["b/0", "b/1"]
    assert credited.advantages == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)], abs=1e-5)


def test_each_advantage_stays_with_its_rollout() -> None:
    credited = credit([group(0.0, 0.0, 1.0, name="a"), group(1.0, 0.0, 0.0, name="b")])
    best = [
        r.rollout_id for r, a in zip(credited.rollouts, credited.advantages, strict=True) if a > 0
    ]
    assert best == ["a/2", "b/0"]


def test_groups_do_not_influence_each_other() -> None:
    first, second = group(1.0, 0.0, name="a"), group(5.0, 9.0, 1.0, name="b")
    assert (
        credit([first, second]).advantages
        == credit([first]).advantages + credit([second]).advantages
    )


def test_shaping_never_decides_whether_a_group_trains() -> None:
    tied = group(verdict(0.0, reward=0.2), verdict(0.0, reward=-0.3))
    assert credit([tied]).rollouts == ()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, None]), max_size=5), max_size=12))
def test_kinds_add_up(batch: list[list[float | None]]) -> None:
    groups = [group(*scores, name=str(i)) for i, scores in enumerate(batch)]
    credited = credit(groups)
    assert sum(credited.kinds.values()) == len(groups)
    assert set(credited.kinds) == set(Kind)
    assert {r.prompt_id for r in credited.rollouts} == {
        g.group_id for g in groups if kind_of(g) is Kind.MIXED
    }


def test_the_rate_by_hand() -> None:
    metrics = credit([group(*s) for s in [(1, 0), (1, 1), (0, 0), (0, 0), (1, None)]]).metrics()
    assert (
        metrics["rollout/zero_variance_rate"] == 3 / 4
    )  # of four groups with two verdicts three are flat
    assert metrics["rollout/groups/mixed"] == 1
    assert metrics["rollout/groups/too_few_verdicts"] == 1
    assert credit([]).metrics()["rollout/zero_variance_rate"] == 0.0


def test_worked_responses_all_have_the_advantage_one() -> None:
    credited = credit([group(1.0, name="a"), group(1.0, None, name="b")], SftSettings())
    assert [r.rollout_id for r in credited.rollouts] == ["a/0", "b/0"]
    assert credited.advantages == (1.0, 1.0)


def test_permuted_rewards_are_credited() -> None:
    groups = [group(1.0, 1.0, 1.0, 1.0, name="a"), group(0.0, 0.0, 0.0, 0.0, name="b")]
    assert credit(groups).rollouts == ()
    assert credit(groups, GrpoSettings(permute_rewards=True)).rollouts
