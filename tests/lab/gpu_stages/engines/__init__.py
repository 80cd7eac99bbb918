"""Stages with an engine beside the trainer."""
