"""Stands for a compiled part of NVIDIA Apex on a machine without a GPU."""

from no_device import fill

__getattr__ = fill(__name__)
