"""The public function `espo_groups`: checks, then one backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from espo_kernels.arguments import (
    require_cu_seqlens_values,
    require_finite,
    require_floating,
    require_mask,
    require_one_device,
    require_packed,
)
from espo_kernels.backends import Backend, checks_values, resolve_backend
from espo_kernels.espo_groups.reference import groups_reference
from espo_kernels.espo_groups.settings import GroupSettings, group_settings
from espo_kernels.segments import offsets_in_bounds


@dataclass(frozen=True)
class EspoGroups:
    """group_id[T] uint8: the token's group, 255 for masked tokens. count[B, K] int32: tokens of
    each group.

    clip[B, K]: ε of each group, 0 for empty ones; float32 (float64 for float64 entropies). K is the
    number of groups; group 0 holds the highest entropies.
    """

    group_id: torch.Tensor
    clip: torch.Tensor
    count: torch.Tensor


def espo_groups(
    old_entropies: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    vocab_size: int,
    alpha: float = 0.02,
    fractions: Sequence[float] = (0.2,),
    min_clip: float = 0.0,
    fixed_clip: float | None = None,
    loss_mask: torch.Tensor | None = None,
    check_values: bool | None = None,
    backend: Backend = "auto",
) -> EspoGroups:
    """Split each sequence's tokens by the old policy's entropy, and give each group its clip width.

        ε_τ = max(min_clip, α · mean_{t∈τ} e_t / log|V|)

    ESPO (arXiv 2512.00499 v2), Eq. 10 and 11.

    Of n unmasked tokens, group 0 holds the k = max(1, ceil(q · n)) of highest entropy, ties by
    position, and the last group the rest. With fractions (q_0, q_1, ...) group j ends at rank
    ceil((q_0 + ... + q_j) · n), exactly: each sum is the nearest fraction with a denominator of at
    most 10^6, so 0.2 is 1/5 and 1/3 + 1/3 is 2/3.

    Args:
        old_entropies: [T] float, nats, packed sequences. Full-vocabulary entropies of the policy at
            step start.
        cu_seqlens: [B + 1] integers, from 0 to T, not decreasing.
        vocab_size: |V|, the true vocabulary without padding.
        alpha: α, clip width per normalised entropy.
        fractions: shares of the groups before the last, each from 1e-6 to 1 - 1e-6. () is one group
            per sequence.
        min_clip: smallest clip width of a non-empty group; 0 is the paper.
        fixed_clip: this width for every non-empty group instead of the entropy-adaptive one (an
            ablation).
        loss_mask: [T] bool, False for tokens that belong to no group. None: every token counts.
        check_values, backend: see `espo_kernels`.

    Returns:
        `EspoGroups` with K = len(fractions) + 1. Empty and fully masked sequences have count 0 and
        clip 0.

    Raises:
        ValueError or TypeError naming the argument. NaN or infinite entropies and an invalid
        cu_seqlens raise where values are checked; otherwise the clip widths they touch are NaN. NaN
        sorts above every number.
    """
    require_packed("old_entropies", old_entropies, cu_seqlens)
    require_floating("old_entropies", old_entropies)
    require_mask(loss_mask, old_entropies.numel(), "old_entropies")
    require_one_device(old_entropies=old_entropies, cu_seqlens=cu_seqlens, loss_mask=loss_mask)
    settings = group_settings(vocab_size, alpha, fractions, min_clip, fixed_clip)
    entropies = old_entropies.detach().contiguous()
    cu_seqlens = cu_seqlens.contiguous()
    selected_backend = resolve_backend(backend, entropies, cpu_needs_numba=True)
    if checks_values(entropies, selected_backend, check_values):
        require_cu_seqlens_values(cu_seqlens, entropies.numel())
        require_finite("old_entropies", entropies, None if loss_mask is None else loss_mask.bool())
    return _groups(selected_backend, entropies, cu_seqlens, loss_mask, settings)


def _groups(
    backend: Backend,
    entropies: torch.Tensor,
    cu_seqlens: torch.Tensor,
    loss_mask: torch.Tensor | None,
    settings: GroupSettings,
) -> EspoGroups:
    if backend == "triton":
        from espo_kernels.espo_groups.triton_kernel import groups_triton

        mask = None if loss_mask is None else loss_mask.contiguous()
        return EspoGroups(*groups_triton(entropies, cu_seqlens, mask, settings))
    keep = (
        torch.ones_like(entropies, dtype=torch.bool)
        if loss_mask is None
        else loss_mask.bool().contiguous()
    )
    offsets, poison = offsets_in_bounds(cu_seqlens, entropies.numel())
    groups = groups_reference
    if backend == "cpu":
        from espo_kernels.espo_groups.cpu import groups_cpu as groups
    group_id, clip, count = groups(entropies, offsets, keep, settings)
    return EspoGroups(group_id, clip + poison, count)
