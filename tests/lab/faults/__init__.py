"""Faults injected into real runs, and the tables of what the runs do and leave."""
