"""Which prompts a step asks, and how many rollouts of each."""
