"""Modes of rank 0: train, train only, evaluate, profile, record."""
