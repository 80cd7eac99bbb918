"""Hostile answers, a module for each verifier."""
