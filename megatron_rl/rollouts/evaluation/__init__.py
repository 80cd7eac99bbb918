"""Rank 0: evaluations of held-out prompts."""
