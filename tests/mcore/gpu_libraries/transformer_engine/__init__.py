"""Stands for Transformer Engine on a machine without a GPU."""

from no_device import fill

__version__ = "2.17.1"
__getattr__ = fill(__name__)
