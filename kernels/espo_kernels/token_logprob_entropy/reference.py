"""Log-probability and entropy by the textbook, differentiated by autograd."""

from __future__ import annotations

import torch
import torch.distributed as dist

from espo_kernels.token_logprob_entropy.vocabulary import LOWEST, VocabularyShard


def logprob_entropy_reference(
    logits: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int | None,
    shard: VocabularyShard,
    entropy_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprob[T], entropy[T]), float64 for float64 logits, else float32.

    log p_v = z_v − log Σ_u exp z_u,  H = −Σ_v p_v log p_v,  z = x / τ over the true vocabulary.
    Holds the softmax.
    """
    x = _all_columns(logits, shard)[:, :vocab_size]
    z = (x if x.dtype == torch.float64 else x.float()) * shard.inverse_temperature
    log_p = z.log_softmax(dim=-1)
    ids = targets.long()
    is_valid = (ids >= 0) & (ids < x.shape[1])
    at_target = log_p.gather(1, ids.clamp(0, x.shape[1] - 1).unsqueeze(1)).squeeze(1)
    logprob = torch.where(is_valid, at_target, torch.nan)
    entropy = -(log_p.exp() * log_p.clamp_min(LOWEST)).sum(-1)
    return logprob, entropy if entropy_grad else entropy.detach()


def _all_columns(logits: torch.Tensor, shard: VocabularyShard) -> torch.Tensor:
    """The logits of all ranks side by side; only this rank's carry a gradient."""
    if shard.group is None:
        return logits
    shards = [torch.empty_like(logits) for _ in range(dist.get_world_size(shard.group))]
    dist.all_gather(shards, logits.detach().contiguous(), group=shard.group)
    shards[dist.get_rank(shard.group)] = logits
    return torch.cat(shards, dim=1)
