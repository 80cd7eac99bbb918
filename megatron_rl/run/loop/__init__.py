"""Rank 0: the training loop, and what it owns: rollouts, engine weights, evaluations, saves."""
