"""How long a run takes: a simulation that is fitted to real runs, and its table for clusters."""
