"""SGLang server processes: command line, start, readiness, supervision and shutdown.

Local rank 0 of each node starts them. `supervise.py` runs in a process between both.
"""
