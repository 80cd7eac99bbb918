"""Checks that the collectives and messages of all ranks of a grid meet, and that no rank waits."""
