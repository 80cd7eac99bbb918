"""Credit assignment: the kind of each group and the advantages of its rollouts."""
