"""Edge cases of losses: clip bounds, limits of log-ratios, and tensors without values."""

import math

import pytest
import torch

from megatron_rl.config.algorithms import GspoSettings
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import ResponseTokens, open_loss, rollout_mismatch
from megatron_rl.losses.clipped_ratio import clipped_surrogate, ratio_through_tokens
from megatron_rl.losses.sequences import sequence_means
from tests.losses.shapes import shape_of


def test_ratio_on_the_clip_bound_is_not_clipped() -> None:
    ratio = torch.tensor([1.5, 0.5], requires_grad=True)
    surrogate = clipped_surrogate(ratio, torch.tensor([1.0, -1.0]), low=0.5, high=0.5)
    surrogate.objective.sum().backward()
    assert not surrogate.clipped_low.any()
    assert not surrogate.clipped_high.any()
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [1.0, -1.0]


def test_token_without_advantage_is_not_clipped() -> None:
    surrogate = clipped_surrogate(torch.tensor([9.0, 0.1]), torch.zeros(2), low=0.2, high=0.2)
    assert not surrogate.clipped_low.any()
    assert not surrogate.clipped_high.any()


def test_log_ratios_are_limited_on_both_sides() -> None:
    values = ratio_through_tokens(torch.tensor([-50.0, 50.0]), torch.zeros(2))
    assert values.tolist() == pytest.approx([math.exp(-10), math.exp(10)])
    sums = rollout_mismatch(torch.tensor([-50.0]), torch.tensor([0.0]))
    assert float(sums["mismatch/k3_kl"][0]) == pytest.approx(math.exp(-10) - 1 + 10)
    assert float(sums["mismatch/logprob_abs_mean"][0]) == 50.0


def test_sequence_ratios_read_no_values_on_the_host() -> None:
    """On a GPU, reading a value would wait for the device. Meta tensors raise an error instead."""
    tokens = torch.zeros(5, device="meta")
    offsets = torch.zeros(3, dtype=torch.int32, device="meta")
    response = ResponseTokens(tokens, tokens, tokens, tokens, offsets)
    objective = open_loss(GspoSettings(), shape_of(48)).prepare(response)
    result = objective(tokens, Denominators(sequences=2, tokens=5))
    assert result.loss.device.type == "meta"
    assert sequence_means(tokens, torch.zeros(2, dtype=torch.int64, device="meta")).shape == (2,)
