"""Both sides: messages, rollouts in shared memory, and rules that rank 0 and collectors share."""
