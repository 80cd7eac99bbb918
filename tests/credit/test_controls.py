from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.contracts.group import Group
from megatron_rl.credit.controls import permute_rewards
from tests.support.groups import group


def rewards_of(groups: list[Group]) -> list[float | None]:
    return [rollout.verdict.reward for g in groups for rollout in g.rollouts]


def ids_of(groups: list[Group]) -> list[str]:
    return [rollout.rollout_id for g in groups for rollout in g.rollouts]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=6), max_size=8),
    st.integers(0, 99),
)
def test_permutation_keeps_rollouts_and_rewards(batch: list[list[int | None]], seed: int) -> None:
    groups = [group(*scores, name=str(i)) for i, scores in enumerate(batch)]
    permuted_groups = permute_rewards(groups, seed)
    before = rewards_of(groups)
    after = rewards_of(permuted_groups)
    assert ids_of(groups) == ids_of(permuted_groups)
    assert [reward is None for reward in before] == [reward is None for reward in after]
    assert Counter(before) == Counter(after)
    assert permute_rewards(groups, seed) == permuted_groups


def test_permutation_makes_rewards_independent_of_responses() -> None:
    # Half of the groups are all correct, half all incorrect. After shuffling, the mean of a group
    # is near 1/2.
    groups = [group(*[float(i % 2)] * 8, name=str(i)) for i in range(64)]
    permuted_groups = permute_rewards(groups, 0)
    means = [np.mean([s.verdict.reward for s in g.rollouts]) for g in permuted_groups]
    assert np.std(means) < 0.25, "0.5 before; 0.18 expected of 8 coin flips"
    correlation = np.corrcoef(rewards_of(groups), rewards_of(permuted_groups))[0, 1]
    assert abs(correlation) < 0.15
    assert permute_rewards(groups, 1) != permuted_groups
