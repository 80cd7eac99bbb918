"""Values of single tokens of a step: every rank sends its values to rank 0."""
