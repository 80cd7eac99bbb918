"""Exchange of rollouts between ranks: the transfer plan and its execution."""
