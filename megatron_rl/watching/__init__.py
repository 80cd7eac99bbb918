"""What a run writes and prints: its directory, its metrics, its progress.

Invariant: only rank 0 writes here, and what it writes is complete after every step: a killed run keeps its history.
"""
