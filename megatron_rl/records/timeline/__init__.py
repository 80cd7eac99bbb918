"""The timeline of a run: its file, which rank 0 writes, and the trace and picture made from it."""
