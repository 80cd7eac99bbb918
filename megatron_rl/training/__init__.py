"""What every rank does with a plan: exchange, batches, old policy, update."""
