"""Replayed routes in a training step, on every rank: their choice, their cost and their effect."""
