"""Shares one gloo device among all process groups of a rank."""

from __future__ import annotations

import os
from types import FunctionType
from typing import Any

from torch.distributed import distributed_c10d


def share_gloo_device() -> None:
    """Make gloo groups created from now on use the device of the first of them.

    torch creates one device for each group, and each device has a thread that wakes up every
    10 ms: forty groups cost a waiting rank 5 % of a core. torch's `new_group` has no option for
    it.

    Nothing changes if TORCH_GLOO_LAZY_INIT is set, because lazy connections fail on a device that
    serves several groups. A second call changes nothing.
    """
    gloo: Any = distributed_c10d.ProcessGroupGloo
    original_init = gloo.__init__
    is_patched = isinstance(original_init, FunctionType)
    if is_patched or os.environ.get("TORCH_GLOO_LAZY_INIT"):
        return
    devices: list[Any] = []

    def __init__(self: Any, *place: Any, **options: Any) -> None:
        if options.keys() != {"timeout"}:
            original_init(self, *place, **options)
        elif not devices:  # torch knows which network interface to use
            original_init(self, *place, **options)
            devices.extend(self.options._devices)
        else:
            original_init(self, *place, _options_with(gloo, devices, options["timeout"]))

    # A subclass would not do: torch asks groups for their class, and they forget that Python
    # created them.
    gloo.__init__ = __init__


def _options_with(gloo: Any, devices: list[Any], timeout: Any) -> Any:
    options = gloo._Options()
    options._devices = devices
    options._timeout = timeout
    options._threads = 2 * len(devices)
    return options
