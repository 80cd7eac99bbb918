"""Batches of rollouts on disk: the documented format, its writer and reader, training on them."""
