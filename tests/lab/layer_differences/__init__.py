"""Differences between an engine and the trainer, operation by operation."""
