"""Exchange of rollouts between all ranks: the transfer plan and its execution."""
