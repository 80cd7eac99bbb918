"""Rank 0: which prompts a step samples, and how many rollouts of each."""
