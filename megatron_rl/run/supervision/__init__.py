"""Supervision of a rank's process: signals, watchdog, exit reasons and shutdown."""
