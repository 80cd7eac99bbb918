"""Typed records that modules and processes exchange. No module here imports torch."""
