import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.credit.advantages import group_relative

REWARDS = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16)


def test_by_hand() -> None:
    # 1, 0, 0, 0: mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4, standard deviation 1/2
    rewards = np.array([1.0, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(group_relative(rewards, eps=0.0), [1.5, -0.5, -0.5, -0.5])
    np.testing.assert_allclose(group_relative(rewards, eps=0.5), [0.75, -0.25, -0.25, -0.25])
    np.testing.assert_allclose(
        group_relative(rewards, normalize_std=False), [0.75, -0.25, -0.25, -0.25]
    )


@pytest.mark.slow
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


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(rewards=st.lists(st.integers(-50, 50), min_size=2, max_size=12), data=st.data())
def test_the_order_of_samples_does_not_matter(rewards: list[int], data: st.DataObject) -> None:
    values = np.array(rewards, float)
    order = data.draw(st.permutations(range(len(rewards))))
    np.testing.assert_allclose(
        group_relative(values)[order], group_relative(values[order]), rtol=1e-12, atol=1e-12
    )


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    rewards=st.lists(st.integers(0, 9), min_size=2, max_size=12),
    scale=st.floats(0.01, 100),
    shift=st.floats(-100, 100),
)
def test_scale_and_shift_of_the_reward_do_not_matter(
    rewards: list[int], scale: float, shift: float
) -> None:
    values = np.array(rewards, float)
    np.testing.assert_allclose(
        group_relative(values * scale + shift, eps=0.0),
        group_relative(values, eps=0.0),
        rtol=1e-6,
        atol=1e-6,
    )


@settings(max_examples=100, deadline=None)
@given(reward=st.floats(-1e300, 1e300), size=st.integers(2, 9))
def test_equal_rewards_give_exactly_zero(reward: float, size: int) -> None:
    assert (group_relative(np.full(size, reward)) == 0.0).all()


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 2)])
def test_a_group_needs_two_rewards(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="G >= 2"):
        group_relative(np.zeros(shape))
