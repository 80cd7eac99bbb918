"""What a run writes and prints: its directory, its metrics, its progress."""
