"""Launches of Triton kernels."""

from __future__ import annotations

from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel on the device of its first argument, a tensor.

    Triton launches on the current device, which may be another one.
    """
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **options)
