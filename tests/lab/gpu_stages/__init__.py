"""Stages of `tests/lab/gpu_check`. Each is a program: `python -m tests.lab.gpu_stages.NAME`."""
