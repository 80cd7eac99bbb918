"""The typed nouns that stages and processes hand to each other; nothing here imports torch."""
