"""Entropy groups as compiled loops: the entropy at each group's edge by selection, then one pass
that assigns.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from espo_kernels.segments import MASKED


@njit(nogil=True, cache=True)
def _edges(entropies, bounds, edge, ties):  # type: ignore[no-untyped-def]
    """For each bound: the lowest entropy before it, and how many tokens of just that entropy lie
    before it.
    """
    n = entropies.size
    descending = -entropies
    for j in range(bounds.shape[0]):
        rank = (n * bounds[j, 0] + bounds[j, 1] - 1) // bounds[j, 1]
        edge[j] = -np.partition(descending, rank - 1)[rank - 1]
        ties[j] = rank - np.sum(entropies > edge[j])


@njit(nogil=True, cache=True)
def assign_groups(entropies, cu_seqlens, mask, bounds, group_id, sums, count):  # type: ignore[no-untyped-def]
    """Fills group_id[T], sums[B, K] (of entropies, float64) and count[B, K].

    bounds[K - 1, 2]: see `GroupSettings`.
    """
    num_bounds = bounds.shape[0]
    edge, ties = np.empty(num_bounds, np.float32), np.empty(num_bounds, np.int64)
    for i in range(cu_seqlens.size - 1):
        start, end = cu_seqlens[i], cu_seqlens[i + 1]
        kept = entropies[start:end][mask[start:end]]
        if kept.size == 0:
            continue
        _edges(kept, bounds, edge, ties)
        for t in range(start, end):
            if not mask[t]:
                group_id[t] = MASKED
                continue
            e, tau = entropies[t], 0
            for j in range(num_bounds):
                if e == edge[j] and ties[j] > 0:
                    ties[j] -= 1
                elif e <= edge[j]:
                    tau = j + 1
            group_id[t] = tau
            sums[i, tau] += e
            count[i, tau] += 1
