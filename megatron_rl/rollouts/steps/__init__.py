"""Rank 0: the rollouts of training steps, sampled one step at a time or ahead of the trainer."""
