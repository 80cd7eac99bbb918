"""Features of a run besides training: one folder each, hung on by registry.py.

Most of them observe the loop of rank 0. Some also act on every rank, around its commands.
"""
