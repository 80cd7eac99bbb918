"""Entropy groups of all sequences at once: one stable sort and segment sums.

Invariant: the same members as the reference, whatever the number of sequences; means accumulate in float64.
"""

from __future__ import annotations

import torch

from espo_kernels.espo_groups.reference import clip_width
from espo_kernels.espo_groups.settings import GroupSettings
from espo_kernels.segments import MASKED, segment_sums, sequence_ids


def groups_cpu(
    old_entropies: torch.Tensor, cu_seqlens: torch.Tensor, mask: torch.Tensor, settings: GroupSettings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(group_id[T] uint8, clip[B, K] float32, count[B, K] int32) for CPU tensors."""
    num_sequences, K = cu_seqlens.numel() - 1, settings.num_groups
    entropies = old_entropies.float()
    kept = mask.nonzero().flatten()
    sequences = sequence_ids(cu_seqlens, entropies.numel())[kept]
    order = ((sequences << 32) + _ascending_key(-entropies[kept])).sort(stable=True).indices
    kept, sequences = kept[order], sequences[order]

    lengths = torch.bincount(sequences, minlength=num_sequences)
    rank = torch.arange(kept.numel()) - (lengths.cumsum(0) - lengths)[sequences]
    groups = torch.zeros_like(rank)
    for numerator, denominator in settings.bounds:
        groups += rank >= ((lengths * numerator + denominator - 1) // denominator)[sequences]
    group_id = torch.full(entropies.shape, MASKED, dtype=torch.uint8)
    group_id[kept] = groups.to(torch.uint8)

    segments = sequences * K + groups
    count = torch.bincount(segments, minlength=num_sequences * K)
    mean = segment_sums(entropies[kept], segments, num_sequences * K) / count
    clip = torch.where(count > 0, clip_width(mean, settings), 0.0)
    shape = (num_sequences, K)
    return group_id, clip.float().view(shape), count.int().view(shape)


def _ascending_key(values: torch.Tensor) -> torch.Tensor:
    """int64 in [0, 2^32) that orders as the float32 does; −0 and 0 are equal."""
    bits = (values + 0.0).view(torch.int32).long()
    return torch.where(bits < 0, -1 - (bits + (1 << 31)), bits) + (1 << 31)
