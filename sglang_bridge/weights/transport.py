"""Interface of the ways to send weights to engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sglang_bridge.admin import AdminClient
from sglang_bridge.weights.buckets import NamedTensors
from sglang_bridge.weights.calls import Failures
from sglang_bridge.weights.crew import SendReport


class WeightTransport(Protocol):
    """One rank's way to send weights to several engines.

    In an update, every owner calls connect, and then send. Rank 0 calls begin between the two, and
    end once all have sent. The caller does not pass a failed engine again within an update.
    `forget` drops the engine's state.
    """

    @property
    def timeout_seconds(self) -> float:
        """The longest time for connecting, and for an update."""
        ...

    def connect(self, admins: Sequence[AdminClient]) -> Failures:
        """Prepare the engines that are not connected yet."""
        ...

    def begin(self, admins: Sequence[AdminClient], version: int, deadline: float) -> Failures:
        """Open an update. deadline: by `time.monotonic`."""
        ...

    def send(
        self,
        tensors: NamedTensors,
        admins: Sequence[AdminClient],
        version: int,
        *,
        bucket_bytes: int,
        deadline: float,
    ) -> SendReport:
        """Deliver this rank's tensors to every engine, and wait until they have arrived.

        admins: in the order of their turns. deadline: by `time.monotonic`.
        """
        ...

    def end(self, admins: Sequence[AdminClient], version: int, deadline: float) -> Failures:
        """Finish the update. The engines hold the weights then, under no version yet."""
        ...

    def forget(self, admin: AdminClient) -> None:
        """Drop an engine that failed."""
        ...

    def close(self) -> None:
        """Leave every engine."""
        ...
