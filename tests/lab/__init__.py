"""Instruments that measure, compare and rehearse the trainer."""
