"""Entropy groups: which tokens share a ratio, and how far that ratio may move."""

from espo_kernels.espo_groups.groups import EspoGroups, espo_groups

__all__ = ["EspoGroups", "espo_groups"]
