"""Entropy-guided advantages (RL-ZVP): values computed by hand, and the losses of a step."""

import itertools

import pytest
import torch

from megatron_rl.mcore import compat

compat.install()

from megatron_rl.config.algorithms import AlgoSettings, EspoSettings, GrpoSettings, GspoSettings
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import ResponseTokens, open_loss
from megatron_rl.models.families import read_shape
from megatron_rl.planning.rank_view import RankView
from megatron_rl.training.entropy_advantages import advantage_sizes, token_advantages
from megatron_rl.training.micro_batches import Batcher, MicroBatch
from tests.support.policies import COLUMN_ADDITION
from tests.support.rollouts import make_rollout

BATCHER = Batcher(RankView(layers=((0, 1, 2, 3),)), None, torch.device("cpu"))


def pack(*rollouts: tuple[int, float, float]) -> MicroBatch:
    """Pack rollouts, given as (response tokens, advantage, entropy advantage)."""
    lengths, advantages, entropy_advantages = zip(*rollouts, strict=True)
    return BATCHER.pack([make_rollout(3, n) for n in lengths], advantages, entropy_advantages)


def test_advantages_computed_by_hand() -> None:
    batch = pack((2, -0.7, 0.0), (3, 0.0, 0.1), (3, 0.0, -0.1), (2, 0.0, 0.5))
    entropies = torch.tensor([9.0, 1.0, 0.0, 2.0, 0.5, 0.0, 2.0, 0.5, 3.0, 1.0])
    # The largest size is 1, so that 0.5 x 3 nats gives 1
    advantages = [-0.7, -0.7, 0.0, 0.2, 0.05, -0.2, 0.0, -0.15, 1.0, 0.5]
    assert token_advantages(batch, entropies).tolist() == pytest.approx(advantages)
    sizes = advantage_sizes(batch, torch.tensor(advantages))
    assert sizes["policy/advantage_zero_variance"].tolist() == pytest.approx(
        [0.2 + 0.05 + 0.2 + 0.15 + 1.0 + 0.5, 8.0]
    )
    assert sizes["policy/advantage_mixed"].tolist() == pytest.approx([1.4, 2.0])


def test_weights_multiply_clipped_advantages_and_count_in_their_means() -> None:
    entropies = torch.tensor([9.0, 1.0, 0.0, 2.0, 3.0, 1.0])
    batch = BATCHER.pack(
        [make_rollout(3, n) for n in (1, 3, 2)], [-1.4, 0.0, 0.0], [0.0, -0.1, 0.5], [2.0, 3.0, 0.5]
    )
    # Clipped first: 0.5 x 3 nats gives 1. The advantage of a mixed group has its weight already.
    advantages = [-1.4, 3 * -0.1, 3 * -0.2, 0.0, 0.5 * 1.0, 0.5 * 0.5]
    assert token_advantages(batch, entropies).tolist() == pytest.approx(advantages)
    sizes = advantage_sizes(batch, torch.tensor(advantages))
    assert sizes["policy/advantage_zero_variance"].tolist() == pytest.approx(
        [0.3 + 0.6 + 0.5 + 0.25, 3 * 3.0 + 2 * 0.5]
    )
    assert sizes["policy/advantage_mixed"].tolist() == pytest.approx([1.4, 2.0])


def test_without_zero_variance_groups_advantages_stay_bit_for_bit() -> None:
    batch = BATCHER.pack([make_rollout(3, 4), make_rollout(2, 3)], [0.123456789, -1.3])
    entropies = torch.full((7,), torch.nan)
    assert token_advantages(batch, entropies).equal(batch.advantages)
    filler = BATCHER.pack([], [])
    assert token_advantages(filler, torch.zeros(0)).shape == (0,)


def test_a_nan_entropy_affects_its_own_response_only() -> None:
    batch = pack((2, 0.0, -0.1), (2, 0.0, -0.1))
    advantages = token_advantages(batch, torch.tensor([torch.nan, 1.0, 2.0, 1.0]))
    assert advantages[:2].isnan().all() and advantages[2:].tolist() == pytest.approx([0.0, -0.1])


ALGORITHMS = [GrpoSettings(), GspoSettings(), EspoSettings(min_clip=0.2)]


def token_weights(algo: AlgoSettings, entropies: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """Return the weight of each token in the loss when every ratio is 1.

    1 / N per token, or 1 / (B |group| groups) for losses with one ratio for a group of tokens.
    """
    if isinstance(algo, GrpoSettings):
        return torch.full_like(entropies, 1 / 4)
    weights = torch.zeros_like(entropies)
    for start, stop in itertools.pairwise(bounds):
        size = stop - start
        weights[start:stop] = 1 / size
        if isinstance(algo, EspoSettings):  # the token of highest entropy is a group of its own
            weights[start:stop] = 1 / (2 * (size - 1))
            weights[start + int(entropies[start:stop].argmax())] = 1 / 2
    return weights


@pytest.mark.parametrize("algo", ALGORITHMS, ids=lambda algo: algo.name)
def test_the_gradient_of_a_step_with_zero_variance_groups(algo: AlgoSettings) -> None:
    batch = pack((4, 1.5, 0.0), (4, 0.0, -0.3), (2, 0.0, 0.3))
    entropies = torch.tensor([1.0, 2.0, 0.5, 0.1, 0.0, 2.0, 0.5, 1.0, 0.5, 1.5])
    advantages = token_advantages(batch, entropies)
    old = -torch.arange(1.0, 11.0) / 10
    response = ResponseTokens(old, entropies, old, advantages, batch.cu_seqlens)
    logprobs = old.clone().requires_grad_()
    counts = Denominators(sequences=1, tokens=4)  # of the mixed group
    open_loss(algo, read_shape(COLUMN_ADDITION)).prepare(response)(logprobs, counts).loss.backward()
    assert logprobs.grad is not None
    gradient = -advantages * token_weights(algo, entropies, batch.cu_seqlens.tolist())
    torch.testing.assert_close(logprobs.grad, gradient)


@pytest.mark.parametrize("algo", ALGORITHMS, ids=lambda algo: algo.name)
def test_each_token_is_clipped_by_the_sign_of_its_own_advantage(algo: AlgoSettings) -> None:
    old = torch.full((4,), -1.0)
    response = ResponseTokens(
        old,
        torch.ones(4),
        old,
        torch.tensor([0.2, -0.2, 0.0, 0.1]),
        torch.tensor([0, 4], dtype=torch.int32),
    )
    for shift, has_gradient in (
        (0.5, [False, True, False, False]),
        (-0.5, [True, False, False, True]),
    ):
        logprobs = (old + shift).requires_grad_()
        loss = open_loss(algo, read_shape(COLUMN_ADDITION)).prepare(response)
        loss(logprobs, Denominators(sequences=1, tokens=4)).loss.backward()
        assert logprobs.grad is not None
        assert (logprobs.grad != 0).tolist() == has_gradient
