"""Stands for the compiled part of Transformer Engine on a machine without a GPU."""

from no_device import fill

__getattr__ = fill(__name__)
