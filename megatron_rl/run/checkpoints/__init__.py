"""Checkpoints of a run: saving, keeping and resuming."""
