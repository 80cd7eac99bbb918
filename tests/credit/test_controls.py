from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.credit.controls import permute_rewards
from tests.support.groups import group


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=6), max_size=8),
    st.integers(0, 99),
)
def test_the_permutation_control_keeps_the_batch(batch: list[list[int | None]], seed: int) -> None:
    groups = [group(*scores, name=str(i)) for i, scores in enumerate(batch)]
    permuted = permute_rewards(groups, seed)
    before, after = ([s for g in gs for s in g.rollouts] for gs in (groups, permuted))
    assert [s.rollout_id for s in before] == [s.rollout_id for s in after]
    assert [s.verdict.reward is None for s in before] == [s.verdict.reward is None for s in after]
    assert Counter(s.verdict.reward for s in before) == Counter(s.verdict.reward for s in after)
    assert permute_rewards(groups, seed) == permuted


def test_the_permutation_control_cuts_the_tie_between_response_and_reward() -> None:
    # Half of the groups all right, half all wrong: after shuffling across the batch a group's mean
    # is near 1/2.
    groups = [group(*[float(i % 2)] * 8, name=str(i)) for i in range(64)]
    permuted = permute_rewards(groups, 0)
    means = [np.mean([s.verdict.reward for s in g.rollouts]) for g in permuted]
    assert np.std(means) < 0.25, "0.5 before; 0.18 expected of 8 coin flips"
    kept = [s.verdict.reward for g in permuted for s in g.rollouts]
    original = [s.verdict.reward for g in groups for s in g.rollouts]
    assert abs(np.corrcoef(original, kept)[0, 1]) < 0.15
    assert permute_rewards(groups, 1) != permuted
