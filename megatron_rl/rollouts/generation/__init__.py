"""Responses from the engines of a run: the pool, its gate, members and slots, one response."""
