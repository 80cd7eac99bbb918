"""Clipped surrogate objective of GRPO and GSPO."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_rl.losses.interface import TokenRatios, mean_of

MAX_LOG_RATIO = 10.0


class Surrogate(NamedTuple):
    """Surrogate objective of T tokens.

    objective: [T], to be maximised.
    clipped_low, clipped_high: bool [T], tokens without a gradient because of the lower or upper
    bound.
    """

    objective: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor


def ratio_through_tokens(log_ratio: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Return s_t = sg[exp(log_ratio_t)] · π_θ(y_t) / sg[π_θ(y_t)], [T].

    GSPO-token (arXiv 2507.18071), Eq. 14: the value is the given ratio, and the gradient goes
    through the token's probability. |log_ratio| is limited to 10 in the value only, so that tokens
    with large ratios keep their gradient. Infinite log-ratios give NaN.
    """
    return limited_ratio(log_ratio) * torch.exp(logprobs - logprobs.detach())


def limited_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(log_ratio) as a constant, with |log_ratio| limited to 10. Any shape.

    Infinite log-ratios give NaN.
    """
    log_ratio = log_ratio.detach()
    # 0 · inf is NaN, so the clamp does not hide an infinity.
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() + log_ratio * 0


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, *, low: float, high: float
) -> Surrogate:
    """Return min(s A, clip(s, 1 - low, 1 + high) A) per token, [T].

    PPO (arXiv 1707.06347), Eq. 7, with the separate bounds of DAPO (arXiv 2503.14476), Eq. 10. The
    minimum is the clipped term if and only if A > 0 and s > 1 + high, or A < 0 and s < 1 - low.
    """
    clipped_high = (advantages > 0) & (ratio > 1 + high)
    clipped_low = (advantages < 0) & (ratio < 1 - low)
    bound = ratio.detach().clamp(1 - low, 1 + high)
    objective = torch.where(clipped_high | clipped_low, bound, ratio) * advantages
    return Surrogate(objective, clipped_low, clipped_high)


def token_ratios(ratio: torch.Tensor, surrogate: Surrogate) -> Callable[[], TokenRatios]:
    """Return a function that computes the ratios for `LossResult`, without the graph."""
    detached_ratio = ratio.detach()

    def compute() -> TokenRatios:
        clips = surrogate.clipped_high.to(torch.int8) - surrogate.clipped_low.to(torch.int8)
        return TokenRatios(detached_ratio, clips)

    return compute


def ratio_metrics(
    ratio: torch.Tensor, surrogate: Surrogate
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return sums and maxima for `LossResult`.

    policy/clip_fraction_low, policy/clip_fraction_high: share of tokens without a gradient.
    policy/ratio_mean: mean ratio, 1 for an unchanged policy.
    policy/ratio_max, policy/inverse_ratio_max: the largest ratio, and 1 / the smallest.
    """
    sums = {
        "policy/clip_fraction_low": mean_of(surrogate.clipped_low),
        "policy/clip_fraction_high": mean_of(surrogate.clipped_high),
        "policy/ratio_mean": mean_of(ratio),
    }
    if ratio.numel() == 0:
        return sums, {}
    return sums, {
        "policy/ratio_max": ratio.detach().max(),
        "policy/inverse_ratio_max": 1 / ratio.detach().min(),
    }
