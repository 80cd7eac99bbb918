"""Modules of a decoder layer that replace or wrap Megatron's own, on CPUs and on GPUs."""
