"""Warnings about the metrics of a step."""
