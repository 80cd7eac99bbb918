"""What every way of moving weights has in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sglang_bridge.weights.buckets import Bucket
from sglang_bridge.weights.calls import EngineLink, Failures


class WeightTransport(Protocol):
    """Moves buckets of one update to several engines. The order is connect, begin, send..., end.

    Links that failed are not passed again within an update; `forget` drops what is kept about a link.
    """

    @property
    def device(self) -> torch.device:
        """Where buckets have to be."""
        ...

    def connect(self, links: Sequence[EngineLink]) -> Failures:
        """Prepare links not connected yet."""
        ...

    def begin(self, links: Sequence[EngineLink], version: int) -> Failures:
        """Open an update."""
        ...

    def send(self, bucket: Bucket, links: Sequence[EngineLink], version: int) -> Failures:
        """Deliver one bucket and return when it has arrived; the last one makes `version` the served one."""
        ...

    def end(self, links: Sequence[EngineLink], version: int) -> Failures:
        """Finish the update."""
        ...

    def forget(self, link: EngineLink) -> None:
        """Drop a link that failed or was replaced."""
        ...

    def close(self) -> None:
        """Leave every engine."""
        ...


def refuse_ipc() -> WeightTransport:
    """GPU memory handles for colocated engines, where trainer and engine share a GPU and cannot share a NCCL group."""
    raise NotImplementedError(
        "sync.transport=ipc is not built: it needs engines on the trainer's own GPUs; use sync.transport=distributed "
        "(engines on other GPUs, or on CPU) or sync.transport=disk"
    )
