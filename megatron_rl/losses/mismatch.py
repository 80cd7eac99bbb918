"""Difference between the policy that sampled the tokens and the trainer's at step start."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from megatron_rl.losses.clipped_ratio import MAX_LOG_RATIO
from megatron_rl.losses.interface import mean_of


def rollout_mismatch(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return (weighted sum, weight) pairs, float32 [2], of T sampled tokens.

    old_logprobs, rollout_logprobs: [T], nats. With w_t = π_old(y_t) / π_rollout(y_t), and |log w|
    limited to 10 except in the first metric:

    mismatch/logprob_abs_mean: mean |log w|.
    mismatch/k3_kl: mean of `k3(log w)`, an estimate of KL(π_rollout ‖ π_old).
    mismatch/ess: effective sample size as a share of T, 1 / mean(w²). This is Kong's
    1 / (1 + Var w) with E[w] = 1, which can be computed from sums. It is 1 for equal policies, and
    noise may raise it slightly above.

    All are NaN for a batch with tokens that were not sampled.
    """
    if old_logprobs.shape != rollout_logprobs.shape or old_logprobs.ndim != 1:
        raise ValueError(
            f"old_logprobs {tuple(old_logprobs.shape)} and rollout_logprobs "
            f"{tuple(rollout_logprobs.shape)} must be [T]"
        )
    difference = (old_logprobs - rollout_logprobs).detach().float()
    log_ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "mismatch/logprob_abs_mean": mean_of(difference.abs()),
        "mismatch/k3_kl": mean_of(k3(log_ratio)),
        "mismatch/ess": mean_of((2 * log_ratio).exp()).flip(0),
    }


def mismatch_by_age(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, ages: npt.NDArray[np.int64]
) -> dict[str, torch.Tensor]:
    """Return (weighted sum, weight) pairs, float32 [2], of sampled tokens for each age.

    ages: [T], in weight versions, of tokens with log-probabilities. On the host: each age is a
    metric of its own, and to look for ages on the device would wait for it. Negative for tokens
    that were not sampled, which do not count.

    mismatch/age/N/logprob_abs_mean, mismatch/age/N/k3_kl: as `rollout_mismatch`, of age N.
    """
    sums: dict[str, torch.Tensor] = {}
    for age in np.unique(ages[ages >= 0]).tolist():
        places = _on_device(np.flatnonzero(ages == age), old_logprobs.device)
        of_age = rollout_mismatch(old_logprobs[places], rollout_logprobs[places])
        for name in ("logprob_abs_mean", "k3_kl"):
            sums[f"mismatch/age/{age}/{name}"] = of_age[f"mismatch/{name}"]
    return sums


def _on_device(places: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Send places to the device without waiting for the copy."""
    tensor = torch.from_numpy(places)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # a copy from other memory would wait
    return tensor.to(device, non_blocking=True)


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(x) - 1 - x of log-ratios x = log q(y)/p(y), for y sampled from p. Any shape.

    This is a non-negative, unbiased estimate of KL(p ‖ q) in nats: estimator k3 of Schulman,
    "Approximating KL divergence" (2020).
    """
    return torch.expm1(log_ratio) - log_ratio
