"""RL-ZVP worked out by hand, and a whole step's losses with it."""

import itertools

import pytest
import torch

from megatron_rl.mcore import compat

compat.install()

from launch.testbed.policies import COLUMN_ADDITION
from megatron_rl.config.algorithms import AlgoSettings, EspoSettings, GrpoSettings, GspoSettings
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import ResponseTokens, open_loss
from megatron_rl.models.families import read_shape
from megatron_rl.planning.rank_view import RankView
from megatron_rl.training.entropy_advantages import advantage_sizes, token_advantages
from megatron_rl.training.micro_batches import Batcher, MicroBatch
from tests.support.rollouts import make_rollout

BATCHER = Batcher(RankView(layers=((0, 1, 2, 3),)), None, torch.device("cpu"))


def pack(*rollouts: tuple[int, float, float]) -> MicroBatch:
    """Tokens, advantage and entropy advantage of each."""
    lengths, advantages, entropic = zip(*rollouts, strict=True)
    return BATCHER.pack([make_rollout(3, n) for n in lengths], advantages, entropic)


def test_by_hand() -> None:
    batch = pack((2, -0.7, 0.0), (3, 0.0, 0.1), (3, 0.0, -0.1), (2, 0.0, 0.5))
    entropies = torch.tensor([9.0, 1.0, 0.0, 2.0, 0.5, 0.0, 2.0, 0.5, 3.0, 1.0])
    expected = [-0.7, -0.7, 0.0, 0.2, 0.05, -0.2, 0.0, -0.15, 1.0, 0.5]  # 0.5 x 3 nats is cut to 1
    assert token_advantages(batch, entropies).tolist() == pytest.approx(expected)
    sizes = advantage_sizes(batch, torch.tensor(expected))
    assert sizes["policy/advantage_flat"].tolist() == pytest.approx(
        [0.2 + 0.05 + 0.2 + 0.15 + 1.0 + 0.5, 8.0]
    )
    assert sizes["policy/advantage_mixed"].tolist() == pytest.approx([1.4, 2.0])


def test_without_flat_rollouts_nothing_changes_bit_for_bit() -> None:
    batch = BATCHER.pack([make_rollout(3, 4), make_rollout(2, 3)], [0.123456789, -1.3])
    entropies = torch.full((7,), torch.nan)
    assert token_advantages(batch, entropies).equal(batch.advantages)
    filler = BATCHER.pack([], [])
    assert token_advantages(filler, torch.zeros(0)).shape == (0,)


def test_an_entropy_that_is_not_finite_stays_in_its_response() -> None:
    batch = pack((2, 0.0, -0.1), (2, 0.0, -0.1))
    found = token_advantages(batch, torch.tensor([torch.nan, 1.0, 2.0, 1.0]))
    assert found[:2].isnan().all() and found[2:].tolist() == pytest.approx([0.0, -0.1])


ALGORITHMS = [GrpoSettings(), GspoSettings(), EspoSettings(min_clip=0.2)]


@pytest.mark.parametrize("algo", ALGORITHMS, ids=lambda algo: algo.name)
def test_the_gradient_of_a_step_with_flat_rollouts(algo: AlgoSettings) -> None:
    """With the old policy's weights every ratio is 1: -A_t / N per token, or -A_t / (B |group|
    groups).
    """
    batch = pack((4, 1.5, 0.0), (4, 0.0, -0.3), (2, 0.0, 0.3))
    entropies = torch.tensor([1.0, 2.0, 0.5, 0.1, 0.0, 2.0, 0.5, 1.0, 0.5, 1.5])
    advantages = token_advantages(batch, entropies)
    old = -torch.arange(1.0, 11.0) / 10
    response = ResponseTokens(old, entropies, old, advantages, batch.cu_seqlens)
    logprobs = old.clone().requires_grad_()
    counts = Denominators(sequences=1, tokens=4)  # those of the mixed one alone
    open_loss(algo, read_shape(COLUMN_ADDITION)).prepare(response)(logprobs, counts).loss.backward()
    assert logprobs.grad is not None
    if isinstance(algo, GrpoSettings):
        expected = -advantages / 4
    else:
        per_token = torch.zeros(10)
        for start, stop in itertools.pairwise(batch.cu_seqlens.tolist()):
            size = stop - start
            per_token[start:stop] = 1 / size
            if isinstance(algo, EspoSettings):  # the token of highest entropy is a group of its own
                top = start + int(entropies[start:stop].argmax())
                per_token[start:stop], per_token[top] = 1 / (2 * (size - 1)), 1 / 2
        expected = -advantages * per_token
    torch.testing.assert_close(logprobs.grad, expected)


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
    for moved, lives in ((0.5, [False, True, False, False]), (-0.5, [True, False, False, True])):
        logprobs = (old + moved).requires_grad_()
        loss = open_loss(algo, read_shape(COLUMN_ADDITION)).prepare(response)
        loss(logprobs, Denominators(sequences=1, tokens=4)).loss.backward()
        assert logprobs.grad is not None
        assert (logprobs.grad != 0).tolist() == lives
