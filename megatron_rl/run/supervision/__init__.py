"""Supervision of each rank's process: signals, watchdog, exit reasons and shutdown."""
