"""Checkpoints in Hugging Face format: checking, reading, writing and merging their files."""
