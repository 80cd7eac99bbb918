"""Features of a run besides training: one folder each, hung on by registry.py."""
