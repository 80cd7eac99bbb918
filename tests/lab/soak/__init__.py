"""A long run with random faults, which shows what they cost and whether anything grows."""
