"""Special cases of ESPO against published objectives, to 1e-8 in float64.

The oracles are written from the formulas of verl (github.com/volcengine/verl, commit b178a3c,
verl/trainer/ppo/core_algos.py: compute_policy_loss_gspo and compute_policy_loss_vanilla with
loss_agg_mode="seq-mean-token-mean"): padded [B, L] tensors, autograd, no shared code. Their dual
clip (ratio above clip_ratio_c with a negative advantage) is no part of PPO-clip; the drift here
stays far below it.
"""

import pytest
import torch
from hypothesis import given, settings

from espo_kernels import espo_groups
from tests.kernels.batches import ResponseBatch, ragged_lengths, response_batch, seeds
from tests.kernels.special_cases import (
    loss_and_gradient,
    one_group_per_sequence,
    one_group_per_token,
    pad_tokens,
)


def sequence_mean_of_token_means(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    tokens = mask.sum(-1)
    means = (losses * mask).sum(-1) / tokens.clamp(min=1)
    return means.sum() / (tokens > 0).sum()


def gspo_token(
    log_prob: torch.Tensor, old: torch.Tensor, A: torch.Tensor, mask: torch.Tensor, clip: float
) -> torch.Tensor:
    mean_log_ratio = ((log_prob - old) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    log_ratio = (log_prob - log_prob.detach() + mean_log_ratio.detach().unsqueeze(-1)).clamp(
        max=10.0
    )
    ratio = log_ratio.exp()
    losses = torch.maximum(-A * ratio, -A * ratio.clamp(1 - clip, 1 + clip))
    return sequence_mean_of_token_means(losses, mask)


def ppo_clip(
    log_prob: torch.Tensor, old: torch.Tensor, A: torch.Tensor, mask: torch.Tensor, clip: float
) -> torch.Tensor:
    ratio = (log_prob - old).clamp(-20.0, 20.0).exp()
    losses = torch.maximum(-A * ratio, -A * ratio.clamp(1 - clip, 1 + clip))
    return sequence_mean_of_token_means(losses, mask)


def oracle_result(
    oracle: object, batch: ResponseBatch, lengths: list[int], clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = batch.logprobs.clone().requires_grad_()
    tensors = (logprobs, batch.old_logprobs, batch.advantages, batch.loss_mask.double())
    loss = oracle(*(pad_tokens(tensor, lengths) for tensor in tensors), clip)
    loss.backward()
    return loss.detach(), logprobs.grad


@settings(max_examples=25, deadline=None)
@given(ragged_lengths, seeds)
def test_one_group_with_a_fixed_clip_is_gspo_token(lengths: list[int], seed: int) -> None:
    batch = response_batch(lengths, seed, drift=0.3)
    if not batch.loss_mask.any():
        return
    loss, gradient = one_group_per_sequence(batch, lengths, 0.05)
    expected_loss, expected_gradient = oracle_result(gspo_token, batch, lengths, 0.05)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-8, atol=1e-12)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(ragged_lengths, seeds)
def test_one_token_groups_with_a_fixed_clip_are_ppo_clip(lengths: list[int], seed: int) -> None:
    batch = response_batch(lengths, seed, drift=0.3)
    if not batch.loss_mask.any():
        return
    loss, gradient = one_group_per_token(batch, lengths, 0.2)
    expected_loss, expected_gradient = oracle_result(ppo_clip, batch, lengths, 0.2)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-8, atol=1e-12)


def test_one_token_groups_inside_sequences_are_ppo_clip() -> None:
    """The same through the list of fractions: as many groups as tokens."""
    lengths = [4, 4, 4]
    batch = response_batch(lengths, 3, drift=0.3, mask_share=0.0)
    groups = espo_groups(
        batch.entropies, batch.cu_seqlens, vocab_size=9, fractions=(0.25,) * 3, fixed_clip=0.2
    )
    assert groups.count.tolist() == [[1] * 4] * 3
    for backend in ("reference", "cpu"):
        dtype = torch.float64 if backend == "reference" else torch.float32
        single = ResponseBatch(
            *(t.to(dtype) if t.is_floating_point() else t for t in vars(batch).values())
        )
        loss, gradient = loss_and_gradient(single, groups, batch.cu_seqlens, 3, backend)
        expected_loss, expected_gradient = oracle_result(ppo_clip, batch, lengths, 0.2)
        tolerance = (
            {"rtol": 1e-8, "atol": 1e-12}
            if backend == "reference"
            else {"rtol": 1e-5, "atol": 1e-6}
        )
        torch.testing.assert_close(loss.double(), expected_loss, **tolerance)
        torch.testing.assert_close(gradient.double(), expected_gradient, **tolerance)
