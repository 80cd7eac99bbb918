import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.contracts.group import Group, RolloutLocation, RolloutRef, Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.credit.advantages import assign_advantages, group_relative, permute_rewards

NOWHERE = RolloutLocation(node=0, pid=0, fd=0, offset=0, nbytes=0)
REWARDS = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16)


def group(*rewards: float | None, name: str = "g") -> Group:
    samples = tuple(
        RolloutRef(
            rollout_id=f"{name}/{i}",
            prompt_id=name,
            sample_index=i,
            num_inputs=9,
            num_trainable=4,
            finish_reason=FinishReason.STOP,
            versions=(0,),
            verdict=Verdict(reward=reward, correctness=reward),
            location=NOWHERE,
        )
        for i, reward in enumerate(rewards)
    )
    return Group(group_id=name, prompt=Prompt(id=name, token_ids=(1,), answer="1", task="t"), samples=samples)


def test_by_hand() -> None:
    # 1, 0, 0, 0: mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4, standard deviation 1/2
    rewards = np.array([1.0, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(group_relative(rewards, eps=0.0), [1.5, -0.5, -0.5, -0.5])
    np.testing.assert_allclose(group_relative(rewards, eps=0.5), [0.75, -0.25, -0.25, -0.25])
    np.testing.assert_allclose(group_relative(rewards, normalize_std=False), [0.75, -0.25, -0.25, -0.25])


@settings(max_examples=200, deadline=None)
@given(rewards=REWARDS, normalize=st.booleans())
def test_advantages_sum_to_zero_and_follow_rewards(rewards: list[float], normalize: bool) -> None:
    values = np.array(rewards)
    advantages = group_relative(values, normalize_std=normalize)
    assert abs(advantages.sum()) <= 1e-9 * max(1.0, np.abs(values).max())
    for i in range(len(values)):
        for j in range(len(values)):
            if values[i] > values[j]:
                assert advantages[i] >= advantages[j], "rewards cannot invert advantages"
            if values[i] == values[j]:
                assert advantages[i] == advantages[j]
    assert advantages[values.argmax()] >= 0 >= advantages[values.argmin()]
    if normalize:
        assert np.abs(advantages).max() <= math.sqrt(len(values)), "bounded by (G - 1) / sqrt(G)"


@settings(max_examples=100, deadline=None)
@given(rewards=st.lists(st.integers(-50, 50), min_size=2, max_size=12), data=st.data())
def test_the_order_of_samples_does_not_matter(rewards: list[int], data: st.DataObject) -> None:
    values = np.array(rewards, float)
    order = data.draw(st.permutations(range(len(rewards))))
    np.testing.assert_allclose(group_relative(values)[order], group_relative(values[order]), rtol=1e-12, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(
    rewards=st.lists(st.integers(0, 9), min_size=2, max_size=12), scale=st.floats(0.01, 100), shift=st.floats(-100, 100)
)
def test_scale_and_shift_of_the_reward_do_not_matter(rewards: list[int], scale: float, shift: float) -> None:
    values = np.array(rewards, float)
    np.testing.assert_allclose(
        group_relative(values * scale + shift, eps=0.0), group_relative(values, eps=0.0), rtol=1e-6, atol=1e-6
    )


@settings(max_examples=100, deadline=None)
@given(reward=st.floats(-1e300, 1e300), size=st.integers(2, 9))
def test_equal_rewards_give_exactly_zero(reward: float, size: int) -> None:
    assert (group_relative(np.full(size, reward)) == 0.0).all()


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 2)])
def test_a_group_needs_two_rewards(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="G >= 2"):
        group_relative(np.zeros(shape))


def test_samples_without_a_verdict_neither_get_nor_influence_advantages() -> None:
    with_gap = assign_advantages([group(1.0, None, 0.0, 0.0, name="a")])
    without = assign_advantages([group(1.0, 0.0, 0.0, name="a")])
    assert [s.sample_index for s in with_gap[0]] == [0, 2, 3]
    assert with_gap[1] == without[1]


def test_groups_with_fewer_than_two_verdicts_are_left_out() -> None:
    batch = [group(1.0, None, name="a"), group(0.0, 1.0, name="b"), group(None, None, name="c"), group(name="d")]
    samples, advantages = assign_advantages(batch, eps=0.0)
    assert [s.rollout_id for s in samples] == ["b/0", "b/1"]
    assert advantages == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)])


def test_groups_do_not_influence_each_other() -> None:
    first, second = group(1.0, 0.0, name="a"), group(5.0, 9.0, 1.0, name="b")
    assert assign_advantages([first, second])[1] == assign_advantages([first])[1] + assign_advantages([second])[1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=6), max_size=8), st.integers(0, 99))
def test_the_permutation_control_keeps_the_batch(batch: list[list[int | None]], seed: int) -> None:
    groups = [group(*scores, name=str(i)) for i, scores in enumerate(batch)]
    permuted = permute_rewards(groups, seed)
    before, after = ([s for g in gs for s in g.samples] for gs in (groups, permuted))
    assert [s.rollout_id for s in before] == [s.rollout_id for s in after]
    assert [s.verdict.reward is None for s in before] == [s.verdict.reward is None for s in after]
    assert Counter(s.verdict.reward for s in before) == Counter(s.verdict.reward for s in after)
    assert permute_rewards(groups, seed) == permuted


def test_the_permutation_control_cuts_the_tie_between_response_and_reward() -> None:
    # Half of the groups all right, half all wrong: after shuffling across the batch a group's mean is near 1/2.
    groups = [group(*[float(i % 2)] * 8, name=str(i)) for i in range(64)]
    permuted = permute_rewards(groups, 0)
    means = [np.mean([s.verdict.reward for s in g.samples]) for g in permuted]
    assert np.std(means) < 0.25, "0.5 before; 0.18 expected of 8 coin flips"
    kept = [s.verdict.reward for g in permuted for s in g.samples]
    original = [s.verdict.reward for g in groups for s in g.samples]
    assert abs(np.corrcoef(original, kept)[0, 1]) < 0.15
    assert permute_rewards(groups, 1) != permuted
