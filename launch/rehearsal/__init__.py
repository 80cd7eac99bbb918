"""Rehearses one rank of a GPU cluster on a machine without GPUs."""
