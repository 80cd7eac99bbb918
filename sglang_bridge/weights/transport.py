"""Interface of the ways to send weights to engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sglang_bridge.admin import AdminClient
from sglang_bridge.weights.buckets import Bucket
from sglang_bridge.weights.calls import Failures


class WeightTransport(Protocol):
    """Sends the buckets of one update to several engines: connect, begin, send..., end.

    The caller does not pass a failed engine again within an update. `forget` drops the engine's
    state.
    """

    @property
    def device(self) -> torch.device:
        """The device on which buckets must be."""
        ...

    def connect(self, admins: Sequence[AdminClient]) -> Failures:
        """Prepare the engines that are not connected yet."""
        ...

    def begin(self, admins: Sequence[AdminClient], version: int) -> Failures:
        """Open an update."""
        ...

    def send(self, bucket: Bucket, admins: Sequence[AdminClient], version: int) -> Failures:
        """Deliver one bucket and wait until it has arrived.

        After the last bucket, the engines serve `version`.
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
