"""Choice of the responses that a run keeps, on rank 0."""
