"""Megatron-Core on a machine without CUDA."""
