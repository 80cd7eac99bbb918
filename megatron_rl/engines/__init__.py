"""The engines of a run: their processes, and the weights they are sent."""
