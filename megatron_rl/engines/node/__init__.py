"""The processes of a node besides its ranks, and what the node reports about them."""
