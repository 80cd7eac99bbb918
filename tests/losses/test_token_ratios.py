"""Ratios and clips of single tokens, for samples, are those that the losses clip by."""

from collections.abc import Callable

import pytest
import torch

from megatron_rl.config.algorithms import CispoSettings, EspoSettings, GrpoSettings, GspoSettings
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import PolicyLoss, ResponseTokens, TokenRatios
from megatron_rl.losses.cispo import Cispo
from megatron_rl.losses.espo import Espo
from megatron_rl.losses.grpo import Grpo
from megatron_rl.losses.gspo import Gspo
from megatron_rl.losses.sft import Sft

LENGTHS = (7, 1, 0, 12)
LOSSES: dict[str, Callable[[], PolicyLoss]] = {
    "espo": lambda: Espo(EspoSettings(min_clip=0.02), vocab_size=50),
    "grpo": lambda: Grpo(GrpoSettings()),
    "cispo": lambda: Cispo(CispoSettings(clip_high=0.5)),
    "gspo": lambda: Gspo(GspoSettings(clip_low=0.05, clip_high=0.05)),
}


def make_response() -> ResponseTokens:
    generator = torch.Generator().manual_seed(0)
    count = sum(LENGTHS)
    logprobs = -torch.rand(count, generator=generator)
    return ResponseTokens(
        old_logprobs=logprobs,
        old_entropies=torch.rand(count, generator=generator),
        rollout_logprobs=logprobs,
        advantages=torch.randn(count, generator=generator),
        cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0).int(),
    )


def ratios_of(
    loss: PolicyLoss, noise: float
) -> tuple[TokenRatios, dict[str, torch.Tensor], torch.Tensor]:
    """Return the ratios, the metrics and the gradient of an update."""
    response = make_response()
    generator = torch.Generator().manual_seed(1)
    change = noise * torch.randn(sum(LENGTHS), generator=generator)
    logprobs = (response.old_logprobs + change).requires_grad_()
    result = loss.prepare(response)(logprobs, Denominators(sequences=3, tokens=sum(LENGTHS)))
    result.loss.backward()
    assert result.token_ratios is not None and logprobs.grad is not None
    return result.token_ratios(), result.sums, logprobs.grad


@pytest.mark.parametrize("name", LOSSES)
def test_clipped_tokens_are_those_without_a_gradient(name: str) -> None:
    ratios, sums, gradient = ratios_of(LOSSES[name](), noise=0.5)
    assert ratios.clips is not None and not ratios.ratios.requires_grad
    assert ratios.clips.any()
    if name != "cispo":  # its clipped tokens have a gradient, too
        assert torch.equal(ratios.clips != 0, gradient == 0)
    for direction, bound in (("low", -1), ("high", 1)):
        total, weight = sums[f"policy/clip_fraction_{direction}"].tolist()
        assert total == (ratios.clips == bound).sum() and weight == sum(LENGTHS)
    total, weight = sums["policy/ratio_mean"].tolist()
    assert ratios.ratios.mean().item() == pytest.approx(total / weight, rel=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_an_unchanged_policy_has_ratios_of_one_and_no_clips(name: str) -> None:
    ratios, _, _ = ratios_of(LOSSES[name](), noise=0.0)
    assert ratios.clips is not None and not ratios.clips.any()
    assert torch.equal(ratios.ratios, torch.ones(sum(LENGTHS)))


def test_supervised_training_marks_no_tokens() -> None:
    objective = Sft().prepare(make_response())
    assert objective(torch.zeros(20), Denominators(sequences=1, tokens=1)).token_ratios is None
