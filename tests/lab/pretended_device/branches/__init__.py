"""Finds the places of the trainer that only a GPU executes, and records which were executed."""
