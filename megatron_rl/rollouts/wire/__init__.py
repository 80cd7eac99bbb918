"""Both sides: messages between rank 0 and the collectors, and rollouts in shared memory."""
