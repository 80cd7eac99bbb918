"""Sending new weights to engines, and auditing that they arrived.

Invariant: an engine either serves one complete version or is paused; it never serves half an update.
"""
