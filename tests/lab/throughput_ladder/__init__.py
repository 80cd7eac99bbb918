"""Measures what each part of sampling brings, one part after the other, with real engines."""
