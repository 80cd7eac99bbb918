"""Phases that change settings during a run (`curriculum`)."""
