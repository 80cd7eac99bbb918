"""Rollouts that are not finished: what there is of them, in a checkpoint and after it."""
