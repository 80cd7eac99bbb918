"""Patches that let torch and Megatron-Core run on a machine without CUDA."""
