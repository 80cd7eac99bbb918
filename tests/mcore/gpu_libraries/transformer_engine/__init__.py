"""Stands for Transformer Engine on a machine without a GPU."""

from no_device import fill

__version__ = "2.11.0"
__getattr__ = fill(__name__)
