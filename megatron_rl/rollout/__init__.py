"""From prompts to judged rollouts: the collector process beside the trainer, and rank 0's view of it.

Invariant: token data never passes through a training rank's interpreter before that rank trains on it; rank 0 sees
`SampleRef` metadata only. Nothing here imports torch.
"""
