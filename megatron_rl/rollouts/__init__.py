"""From prompts to judged rollouts: the collector process beside the trainer, and rank 0's view of
it.
"""
