"""Faults injected into real runs, and the table of what the runs leave."""
