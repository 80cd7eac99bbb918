"""Step plans, the part of a batch that each rank needs, and memory estimates.

Rank 0 plans the steps of a run, and `launch/preflight.py` estimates memory before it.
"""
