"""Hands weights from ranks to engines on the same devices, in memory that both processes map."""
