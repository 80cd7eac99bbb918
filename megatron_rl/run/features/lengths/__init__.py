"""Measured lengths of rollouts, by prompt and task, and the expectations that follow from them."""
