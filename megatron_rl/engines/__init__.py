"""The engines of a run: their processes, and the weights that they receive.

Rank 0 decides which engines serve. Local rank 0 of each node starts and watches the processes of
its node (`node/`). Every rank sends its part of the weights (`rank_part.py`).
"""
