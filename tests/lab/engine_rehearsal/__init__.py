"""Rehearses the start of an SGLang engine on GPUs, and its loading of weights, without a GPU."""
