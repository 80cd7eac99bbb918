"""Entropy-guided advantages (RL-ZVP) for tokens of all-correct and all-incorrect groups."""

from __future__ import annotations

import torch

from megatron_rl.losses.sequences import sequence_lengths, spread
from megatron_rl.training.micro_batches import MicroBatch

_MAX_SIZE = 1.0


def token_advantages(batch: MicroBatch, entropies: torch.Tensor) -> torch.Tensor:
    """Return the advantage of every trained token, float32 [T].

    entropies: float32 [T], nats, of the old policy.

    Tokens of zero-variance groups get their advantage from the entropies (arXiv 2509.21880,
    equations 4 and 5). The others keep `batch.advantages`.

        all correct:    A_t = +α H_t
        all incorrect:  A_t = -α (max_k H_k - H_t)      maximum over the response's trained tokens

    A_t is clipped to [-1, 1], and multiplied by the weight of its group. `batch.entropy_advantages`
    holds +α and -α. H is the full-vocabulary entropy at the start of the step. The paper recomputes
    it for every gradient step, which is the same for the first one. NaN stays NaN.
    """
    alpha = batch.entropy_advantages
    lengths = sequence_lengths(batch.cu_seqlens)
    sequence_of_token = spread(
        torch.arange(len(lengths), device=entropies.device), lengths, entropies.numel()
    )
    maxima = entropies.new_zeros(len(lengths)).scatter_reduce(
        0, sequence_of_token, entropies, "amax"
    )
    highest = maxima[sequence_of_token]
    advantages = torch.where(alpha > 0, alpha * entropies, alpha * (highest - entropies))
    advantages = batch.weights * advantages.clamp(-_MAX_SIZE, _MAX_SIZE)
    return torch.where(alpha == 0, batch.advantages, advantages.to(batch.advantages.dtype))


def advantage_sizes(batch: MicroBatch, advantages: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return (sum, weight), float32 [2], of |A_t| over tokens of zero-variance and other groups.

    advantages: with the weights of groups as factors, as `token_advantages` returns them. Each
    token counts with that weight.
    """
    is_zero_variance = (batch.entropy_advantages != 0).float()
    shares = {
        "policy/advantage_zero_variance": is_zero_variance,
        "policy/advantage_mixed": 1.0 - is_zero_variance,
    }
    return {
        name: torch.stack([(advantages.abs() * share).sum(), (batch.weights * share).sum()])
        for name, share in shares.items()
    }
