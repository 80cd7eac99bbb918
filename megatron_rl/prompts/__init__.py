"""Rank 0: sources of prompts, which are files, embedded tasks, generators, and mixtures of them."""
