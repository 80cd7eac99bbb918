"""Runs the layers of Transformer Engine on a machine without a GPU."""
