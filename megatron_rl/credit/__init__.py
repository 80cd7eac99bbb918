"""What each group is worth: its kind, and the advantages of its rollouts."""
