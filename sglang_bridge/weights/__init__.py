"""Sending new weights to engines, and auditing that they arrived."""
