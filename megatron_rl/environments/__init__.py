"""What happens with one prompt: turns of the engine, and of whoever answers it."""
