"""Entropy groups: which tokens share a ratio, and how far that ratio may move.

Invariant: groups depend on the old policy alone; they are built once per rollout batch and reused by every update.
"""

from espo_kernels.espo_groups.groups import EspoGroups, espo_groups

__all__ = ["EspoGroups", "espo_groups"]
