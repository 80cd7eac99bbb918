"""What every way of moving weights has in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sglang_bridge.admin import AdminClient
from sglang_bridge.weights.buckets import Bucket
from sglang_bridge.weights.calls import Failures


class WeightTransport(Protocol):
    """Moves buckets of one update to several engines. The order is connect, begin, send..., end.

    Engines that failed are not passed again within an update; `forget` drops what is kept about
    one.
    """

    @property
    def device(self) -> torch.device:
        """Where buckets have to be."""
        ...

    def connect(self, admins: Sequence[AdminClient]) -> Failures:
        """Prepare engines not connected yet."""
        ...

    def begin(self, admins: Sequence[AdminClient], version: int) -> Failures:
        """Open an update."""
        ...

    def send(self, bucket: Bucket, admins: Sequence[AdminClient], version: int) -> Failures:
        """Deliver one bucket and return when it has arrived; the last one makes `version` the
        served one.
        """
        ...

    def end(self, admins: Sequence[AdminClient], version: int) -> Failures:
        """Finish the update."""
        ...

    def forget(self, admin: AdminClient) -> None:
        """Drop an engine that failed."""
        ...

    def close(self) -> None:
        """Leave every engine."""
        ...
