"""Runs the stages of `launch/gpu_check.py`. It needs nothing but the standard library."""
