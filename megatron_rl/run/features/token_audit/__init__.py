"""The comparison of the token account with the counters of engines."""
