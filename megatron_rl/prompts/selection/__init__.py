"""Prompt selection: which prompts a step samples, and how many rollouts of each."""
