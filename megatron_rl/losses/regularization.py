"""Terms that are added to any policy loss: a KL penalty and an entropy bonus."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from megatron_rl.config.algorithms import AlgoSettings
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses.clipped_ratio import MAX_LOG_RATIO
from megatron_rl.losses.interface import LossResult, mean_of, require_denominator
from megatron_rl.losses.mismatch import k3


class Regularization:
    """Adds `algo.kl.coef` · KL - `algo.entropy_coef` · H to a loss.

        KL = 1/N Σ_t w_t k3(log π_ref(y_t) - log π_θ(y_t))
        H  = 1/N Σ_t w_t H_t

    N = denominators.tokens, for every loss. w_t is the weight of the token's group, and H_t the
    entropy of π_θ over the whole vocabulary. With both coefficients 0 a loss stays the same object.
    """

    def __init__(self, algo: AlgoSettings) -> None:
        self._kl_coef = algo.kl.coef
        self._entropy_coef = algo.entropy_coef

    @property
    def entropy_grad(self) -> bool:
        """True if the entropies need a gradient."""
        return self._entropy_coef > 0

    def add(
        self,
        result: LossResult,
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
        *,
        reference_logprobs: torch.Tensor | None,
        weights: torch.Tensor,
        denominators: Denominators,
    ) -> LossResult:
        """Return the loss of a micro-batch with the terms, and with their metrics.

        logprobs, entropies: float32 [T], nats, of the policy π_θ, attached to its graph.
        reference_logprobs: float32 [T], nats, of the frozen reference. None without a KL penalty.
        weights: float32 [T].

        policy/kl_reference: mean k3 of a token, in nats.
        policy/current_entropy: mean H_t of a token, in nats.
        """
        if not self._kl_coef and not self._entropy_coef:
            return result
        count = require_denominator("tokens", denominators.tokens, logprobs.numel())
        loss = result.loss
        sums = dict(result.sums)
        if self._kl_coef:
            divergences = reference_divergence(logprobs, reference_logprobs)
            loss = loss + self._kl_coef * (weights * divergences).sum() / count
            sums["policy/kl_reference"] = mean_of(divergences)
        if self._entropy_coef:
            loss = loss - self._entropy_coef * (weights * entropies).sum() / count
            sums["policy/current_entropy"] = mean_of(entropies)
        return replace(result, loss=loss, sums=sums)


def reference_divergence(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor | None
) -> torch.Tensor:
    """Return k3(x) of each token, x = log π_ref(y_t) - log π_θ(y_t), [T].

    Its expectation over y ~ π_θ is KL(π_θ ‖ π_ref). The gradient with respect to log π_θ(y_t) is
    1 - exp(x). Beyond x = 10, k3 continues along its tangent, so that a token that π_θ almost
    excludes keeps a finite gradient.

    Raises ValueError without reference log-probabilities of the same shape.
    """
    if reference_logprobs is None or reference_logprobs.shape != logprobs.shape:
        shape = None if reference_logprobs is None else tuple(reference_logprobs.shape)
        raise ValueError(
            f"reference_logprobs have shape {shape}, logprobs {tuple(logprobs.shape)}; they must "
            "be equal"
        )
    log_ratio = reference_logprobs.detach() - logprobs
    slope = math.expm1(MAX_LOG_RATIO)
    tangent = slope - MAX_LOG_RATIO + slope * (log_ratio - MAX_LOG_RATIO)
    # A sum of both branches would cancel gradients of 22,025, which leaves noise of 1e-3
    inside = k3(log_ratio.clamp(max=MAX_LOG_RATIO))
    return torch.where(log_ratio > MAX_LOG_RATIO, tangent, inside)
