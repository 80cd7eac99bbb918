"""Measures the processes of user-defined classes: their cost, and how fast hostile ones end."""
