"""Responses from the engines of a node: the pool, its slots, and responses in pieces."""
