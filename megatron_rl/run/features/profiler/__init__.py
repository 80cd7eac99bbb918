"""Traces of chosen steps (`logger.profile_steps`)."""
