"""Rank 0: the kind of each group, the advantages of its rollouts, and the account of tokens."""
