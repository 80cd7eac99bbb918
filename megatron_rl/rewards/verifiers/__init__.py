"""Verifiers: scorers that judge by rules that repeat, each in a worker process with limits.

`Verifier` (`verifier.py`) judges in a `Worker`, which the kernel ends beyond its limits of CPU time
and memory. An answer beyond a limit of size, depth or digits is incorrect by rule. A call beyond
its time has no verdict.
"""
