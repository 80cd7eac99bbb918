"""The training loop of rank 0 and what it owns: rollouts, engine weights, evaluations, saves."""
