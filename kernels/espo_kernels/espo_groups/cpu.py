"""CPU path of the entropy groups."""

from __future__ import annotations

import numpy as np
import torch

from espo_kernels.espo_groups.numba_loops import assign_groups
from espo_kernels.espo_groups.reference import clip_width
from espo_kernels.espo_groups.settings import GroupSettings
from espo_kernels.segments import MASKED


def groups_cpu(
    old_entropies: torch.Tensor,
    cu_seqlens: torch.Tensor,
    mask: torch.Tensor,
    settings: GroupSettings,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(group_id[T] uint8, clip[B, K] float32, count[B, K] int32) for CPU tensors."""
    shape = (cu_seqlens.numel() - 1, settings.num_groups)
    group_id = torch.full(old_entropies.shape, MASKED, dtype=torch.uint8)
    sums = torch.zeros(shape, dtype=torch.float64)
    count = torch.zeros(shape, dtype=torch.int32)
    entropies = old_entropies.float()
    assign_groups(
        # NaN sorts above all in the other backends and makes its group's width NaN, and so does
        # infinity.
        torch.where(entropies.isnan(), torch.inf, entropies).numpy(),
        cu_seqlens.numpy(),
        mask.numpy(),
        np.array(settings.bounds, dtype=np.int64).reshape(-1, 2),
        group_id.numpy(),
        sums.numpy(),
        count.numpy(),
    )
    clip = torch.where(count > 0, clip_width(sums / count, settings), 0.0)
    return group_id, clip.float(), count
