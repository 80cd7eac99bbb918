"""One gloo device for all process groups of a rank."""

from __future__ import annotations

import os
from types import FunctionType
from typing import Any

from torch.distributed import distributed_c10d


def share_gloo_device() -> None:
    """Let gloo groups that this process makes from now on share the device that torch gives the
    first of them.

    torch makes one for each group, and each has a thread that wakes up every 10 ms: forty groups
    cost a waiting rank 5 % of a core. torch's `new_group` has no option for it. Nothing changes
    where TORCH_GLOO_LAZY_INIT is set: connections made late fail on a device that has several
    groups.
    """
    gloo: Any = distributed_c10d.ProcessGroupGloo
    own = gloo.__init__
    if isinstance(own, FunctionType) or os.environ.get("TORCH_GLOO_LAZY_INIT"):
        return
    devices: list[Any] = []

    def __init__(self: Any, *place: Any, **given: Any) -> None:
        if given.keys() != {"timeout"}:
            own(self, *place, **given)
        elif not devices:  # torch knows which interface
            own(self, *place, **given)
            devices.extend(self.options._devices)
        else:
            options = gloo._Options()
            options._devices, options._timeout, options._threads = (
                devices,
                given["timeout"],
                2 * len(devices),
            )
            own(self, *place, options)

    # not a subclass: torch asks groups for their class, and they forget that Python made them
    gloo.__init__ = __init__
