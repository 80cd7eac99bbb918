"""The modes besides training: each in one file."""
