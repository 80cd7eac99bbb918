"""Reactions to numbers that go wrong: loss spikes, collapsing entropy, NaN (`guard.*`)."""
