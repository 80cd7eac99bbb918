"""Training of a planned step on every rank: exchange, micro-batches, old policy, update."""
