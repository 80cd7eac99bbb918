"""Runs the stages of `tests/lab/gpu_check`. It needs nothing but the standard library."""
