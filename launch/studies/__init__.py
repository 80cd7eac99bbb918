"""Studies of the trainer: programs that only measure or compare."""
