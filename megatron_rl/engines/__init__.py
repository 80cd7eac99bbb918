"""The engines of a run: their processes, and the weights that they receive."""
