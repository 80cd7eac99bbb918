"""The timeline of a run: its file, its trace and its picture."""
