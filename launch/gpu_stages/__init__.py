"""Stages of `launch/gpu_check.py`. Each is a program: `python -m launch.gpu_stages.NAME`."""
