"""Checkpoints of a run: saving, storing, resuming, exporting and merging them.

Rank 0 decides when one is saved, and every rank writes its part.
"""
