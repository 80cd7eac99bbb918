"""Entropy groups in the paper's notation, one sequence and one group at a time."""

from __future__ import annotations

from itertools import pairwise

import torch

from espo_kernels.espo_groups.settings import GroupSettings
from espo_kernels.segments import MASKED, without_infinities


def groups_reference(
    old_entropies: torch.Tensor,
    cu_seqlens: torch.Tensor,
    mask: torch.Tensor,
    settings: GroupSettings,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(group_id[T], clip[B, K], count[B, K]); arithmetic in float64 for float64 entropies, else
    float32.
    """
    e = old_entropies if old_entropies.dtype == torch.float64 else old_entropies.float()
    num_sequences = cu_seqlens.numel() - 1
    K = settings.num_groups
    group_id = torch.full(e.shape, MASKED, dtype=torch.uint8, device=e.device)
    clip = torch.zeros(num_sequences, K, dtype=e.dtype, device=e.device)
    count = torch.zeros(num_sequences, K, dtype=torch.int32, device=e.device)
    offsets = cu_seqlens.tolist()
    for i, (start, end) in enumerate(pairwise(offsets)):
        for tau, members in enumerate(_groups_of(e, start, mask[start:end], settings)):
            group_id[members] = tau
            count[i, tau] = members.numel()
            if members.numel():
                clip[i, tau] = clip_width(e[members].mean(), settings)
    return group_id, clip, count


def _groups_of(
    e: torch.Tensor, start: int, mask: torch.Tensor, settings: GroupSettings
) -> list[torch.Tensor]:
    """Token indices of each group of the sequence that begins at `start`."""
    tokens = start + mask.nonzero().flatten()
    n = tokens.numel()
    order = e[tokens].sort(descending=True, stable=True).indices  # ties keep their positions
    ranks = [0, *settings.first_ranks(n), n]
    return [tokens[order][first:last] for first, last in pairwise(ranks)]


def clip_width(mean_entropy: torch.Tensor, settings: GroupSettings) -> torch.Tensor:
    """ε_τ = max(min_clip, α · mean_{t∈τ} e_t / log|V|), or the fixed width.

    NaN for a mean that is not finite.
    """
    mean_entropy = without_infinities(mean_entropy)
    if settings.fixed_clip is not None:
        return settings.fixed_clip + (mean_entropy - mean_entropy)
    return (settings.scale * mean_entropy).clamp_min(settings.min_clip)
