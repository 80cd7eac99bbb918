"""Model families by their Hugging Face checkpoints, and the tokenizer; nothing here imports torch."""
