"""Entropy groups as compiled loops.

The entropy at each group's edge comes from selection. One pass then assigns the groups.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from espo_kernels.segments import MASKED


@njit(nogil=True, cache=True)
def _edges(entropies, bounds, edge, ties):  # type: ignore[no-untyped-def]
    """Fill, for each bound, the lowest entropy before it and the number of its ties before it."""
    n = entropies.size
    descending = -entropies
    for j in range(bounds.shape[0]):
        rank = (n * bounds[j, 0] + bounds[j, 1] - 1) // bounds[j, 1]
        edge[j] = -np.partition(descending, rank - 1)[rank - 1]
        ties[j] = rank - np.sum(entropies > edge[j])


@njit(nogil=True, cache=True)
def assign_groups(  # type: ignore[no-untyped-def]
    entropies, cu_seqlens, mask, bounds, group_id, sums, count
):
    """Fill group_id[T], sums[B, K] (of entropies, float64) and count[B, K].

    bounds[K - 1, 2]: see `GroupSettings`.
    """
    num_bounds = bounds.shape[0]
    edge = np.empty(num_bounds, np.float32)
    ties = np.empty(num_bounds, np.int64)
    for i in range(cu_seqlens.size - 1):
        start = cu_seqlens[i]
        end = cu_seqlens[i + 1]
        values = entropies[start:end][mask[start:end]]
        if values.size == 0:
            continue
        _edges(values, bounds, edge, ties)
        for t in range(start, end):
            if not mask[t]:
                group_id[t] = MASKED
                continue
            e = entropies[t]
            tau = 0
            for j in range(num_bounds):
                if e == edge[j] and ties[j] > 0:
                    ties[j] -= 1
                elif e <= edge[j]:
                    tau = j + 1
            group_id[t] = tau
            sums[i, tau] += e
            count[i, tau] += 1
