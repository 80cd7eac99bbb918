"""RL-ZVP: the tokens of groups that are all right or all wrong get their advantages from the old
policy's entropies.
"""

from __future__ import annotations

import torch

from megatron_rl.losses.sequences import sequence_lengths, spread
from megatron_rl.training.micro_batches import MicroBatch

_MOST = 1.0


def token_advantages(batch: MicroBatch, entropies: torch.Tensor) -> torch.Tensor:
    """float32 [T]: `batch.advantages`, and of flat groups' tokens what follows from entropies
    float32 [T] in nats.

        all right:  A_t = +α H_t                            arXiv 2509.21880, Eq. 4 and 5
        all wrong:  A_t = -α (max_k H_k - H_t)              the maximum is over the response's trained tokens

    α is `batch.entropy_advantages`, negative for wrong ones. |A_t| is at most 1. H is the
    full-vocabulary entropy at the step's start, where the paper recomputes it at every gradient
    step: the same in the first of them. NaN stays.
    """
    alpha, lengths = batch.entropy_advantages, sequence_lengths(batch.cu_seqlens)
    place = spread(torch.arange(len(lengths), device=entropies.device), lengths, entropies.numel())
    highest = entropies.new_zeros(len(lengths)).scatter_reduce(0, place, entropies, "amax")[place]
    found = torch.where(alpha > 0, alpha * entropies, alpha * (highest - entropies)).clamp(
        -_MOST, _MOST
    )
    return torch.where(alpha == 0, batch.advantages, found.to(batch.advantages.dtype))


def advantage_sizes(batch: MicroBatch, advantages: torch.Tensor) -> dict[str, torch.Tensor]:
    """(sum, weight) pairs, float32 [2]: the mean |A_t| over tokens of flat groups, and over all
    others.
    """
    flat = (batch.entropy_advantages != 0).float()
    pairs = {"policy/advantage_flat": flat, "policy/advantage_mixed": 1.0 - flat}
    return {
        name: torch.stack([(advantages.abs() * of).sum(), of.sum()]) for name, of in pairs.items()
    }
