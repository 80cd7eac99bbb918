"""Plugins of SGLang. Every process of a server loads them, on GPUs too."""
