"""Reinforcement learning for Mixture-of-Experts language models on Megatron-Core and SGLang."""
