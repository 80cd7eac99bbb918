"""Comparison of training runs: several variants over several seeds, in one table and one plot.

Run it with `python -m tests.lab.comparison --help` in the root of the repository.
"""
