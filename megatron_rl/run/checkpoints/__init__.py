"""Checkpoints of a run: saving, storing, resuming, exporting and merging them."""
