"""The timeline of a run (`logger.timeline`)."""
