"""Groups that say NCCL and are carried by gloo."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_TIMEOUT = datetime.timedelta(minutes=10)  # NCCL's own


class _Options:
    """Options of NCCL. Gloo needs only the time limit."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._timeout = _TIMEOUT
        self.is_high_priority_stream = False
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self.split_from: Any = None
        self.split_color = 0
        self.config = type("Config", (), {})()


class PretendedNccl(dist.ProcessGroupGloo):
    """A group whose tensors must be on the device. The C++ library hands gloo their bytes."""

    Options: Any = _Options

    def __init__(self, store: Any, rank: int, size: int, options: _Options) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)


def install_nccl() -> None:
    """Let `torch.distributed` create groups of the backend "nccl"."""
    groups: Any = distributed_c10d
    groups._NCCL_AVAILABLE = True
    groups.ProcessGroupNCCL = PretendedNccl
    groups.default_pg_nccl_timeout = _TIMEOUT
