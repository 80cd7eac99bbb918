"""The time that a run takes: simulated, fitted to real runs, and for clusters."""
