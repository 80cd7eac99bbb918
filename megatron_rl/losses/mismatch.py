"""How far the policy that sampled the tokens is from the trainer's policy at step start."""

from __future__ import annotations

import torch

from megatron_rl.losses.clipped_ratio import MAX_LOG_RATIO
from megatron_rl.losses.interface import mean_of


def rollout_mismatch(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor
) -> dict[str, torch.Tensor]:
    """(weighted sum, weight) pairs, float32 [2], from log-probabilities [T] in nats of the sampled
    tokens.

    With w_t = π_old(y_t) / π_rollout(y_t), |log w| limited to 10: mismatch/logprob_abs_mean: mean
    |log w|. mismatch/k3_kl: mean of `k3(log w)`, an estimate of KL(π_rollout ‖ π_old).
    mismatch/ess: effective sample size of the weights as a share of T, 1 / mean(w²): Kong's 1 / (1
    + Var w) with the expectation E[w] = 1 put in, so that it reduces from sums. 1 for equal
    policies; noise may lift it slightly above. All are NaN for a batch with tokens that nobody
    sampled.
    """
    if old_logprobs.shape != rollout_logprobs.shape or old_logprobs.ndim != 1:
        raise ValueError(
            f"old_logprobs {tuple(old_logprobs.shape)} and rollout_logprobs {tuple(rollout_logprobs.shape)} must be [T]"
        )
    difference = (old_logprobs - rollout_logprobs).detach().float()
    limited = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "mismatch/logprob_abs_mean": mean_of(difference.abs()),
        "mismatch/k3_kl": mean_of(k3(limited)),
        "mismatch/ess": mean_of((2 * limited).exp()).flip(0),
    }


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(x) - 1 - x for x = log q(y)/p(y), y drawn from p: unbiased for KL(p ‖ q) in nats, never
    negative, any shape.

    Schulman, "Approximating KL divergence" (2020), estimator k3.
    """
    return torch.expm1(log_ratio) - log_ratio
