"""Values of single tokens of a step, and their way to rank 0."""
