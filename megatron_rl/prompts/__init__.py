"""Sources of prompts: files, embedded tasks, generators, and mixtures of them."""
