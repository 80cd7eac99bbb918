"""One gloo device for all process groups of a rank."""

from __future__ import annotations

import datetime
from typing import Any

from torch.distributed import distributed_c10d


def share_gloo_device() -> None:
    """Let gloo groups that this process makes from now on share the device that torch gives the first of them.

    torch makes one for each group, and each has a thread that wakes up every 10 ms: forty groups cost a waiting rank 5 %
    of a core. torch's `new_group` has no option for it.
    """
    library: Any = distributed_c10d
    own = library.ProcessGroupGloo
    if own.__module__ == __name__:
        return
    devices: list[Any] = []

    class ProcessGroupGloo(own):  # type: ignore[misc, valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
            if not devices:  # torch knows which interface
                super().__init__(store, rank, size, timeout=timeout)
                devices.extend(self.options._devices)
                return
            options = own._Options()
            options._devices, options._timeout, options._threads = devices, timeout, 2 * len(devices)
            super().__init__(store, rank, size, options)

    library.ProcessGroupGloo = ProcessGroupGloo
