"""Batches of rollouts on disk: the documented format, its writer and its reader.

Every process that has rollouts uses it.
"""
