"""Local rank 0 of each node: the processes beside the ranks, and reports about them."""
