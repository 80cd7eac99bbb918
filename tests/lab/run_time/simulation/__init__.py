"""The time that a run takes, simulated event by event."""
