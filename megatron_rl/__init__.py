"""Reinforcement learning for Mixture-of-Experts language models on Megatron-Core and SGLang.

Invariant: importing this package imports neither torch nor Megatron, so that a configuration can be refused before
anything expensive starts.
"""
