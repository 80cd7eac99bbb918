"""Mutation testing: changes to the code that a unit test must notice."""
