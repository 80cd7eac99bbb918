"""Replayed routes in a training step: their choice, their cost and their effect."""
