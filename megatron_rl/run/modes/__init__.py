"""Rank 0: what a run does, by `mode`: train, train only, evaluate, profile, record."""
