"""Broadcasts buckets over process groups that trainer and engines share."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from sglang_bridge.errors import EngineError
from sglang_bridge.weights.buckets import Bucket
from sglang_bridge.weights.calls import EngineLink, Failures, call_each
from sglang_bridge.weights.engine_group import EngineGroup


class DistributedTransport:
    """gloo on CPUs, NCCL on GPUs. address: of this process, reachable by every engine. device: the rank's GPU."""

    def __init__(
        self,
        *,
        address: str,
        backend: str,
        timeout_seconds: float,
        engines_per_group: int = 1,
        device: torch.device | None = None,
    ) -> None:
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"weight transport backend {backend!r}: gloo (CPU) or nccl (GPU)")
        if (backend == "nccl") != (device is not None and device.type == "cuda"):
            raise ValueError(f"weight transport backend {backend!r} with device {device}: nccl needs a GPU, gloo none")
        self._address = address
        self._backend = backend
        self._timeout = timeout_seconds
        self._engines_per_group = engines_per_group
        self._device = device or torch.device("cpu")
        self._groups: list[EngineGroup] = []

    @property
    def device(self) -> torch.device:
        """Where buckets have to be."""
        return self._device

    def connect(self, links: Sequence[EngineLink]) -> Failures:
        """Make groups for the links that have none."""
        connected = {link for group in self._groups for link in group.links}
        missing = [link for link in links if link not in connected]
        failures: Failures = {}
        for start in range(0, len(missing), self._engines_per_group):
            members = missing[start : start + self._engines_per_group]
            try:
                group = EngineGroup.open(members, address=self._address, backend=self._backend, timeout=self._timeout)
            except EngineError as error:
                failures |= {link.url: str(error) for link in members}
            else:
                self._groups.append(group)
        return failures

    def begin(self, links: Sequence[EngineLink], version: int) -> Failures:
        """Open a session. Its reply comes first: an engine without one would leave the broadcast waiting."""
        return call_each(links, lambda link: link.admin.begin_weight_update())

    def send(self, bucket: Bucket, links: Sequence[EngineLink], version: int) -> Failures:
        """Broadcast one bucket to all groups at once and wait until every engine has loaded it."""
        deadline = time.monotonic() + self._timeout
        groups = [group for group in self._groups if any(link in group.links for link in links)]
        deliveries = [group.deliver(bucket, str(version) if bucket.last else None) for group in groups]
        failures: Failures = {}
        for delivery in deliveries:
            failures |= delivery.finish(deadline)
        return failures

    def end(self, links: Sequence[EngineLink], version: int) -> Failures:
        """Close the session."""
        return call_each(links, lambda link: link.admin.end_weight_update())

    def forget(self, link: EngineLink) -> None:
        """Drop the link's group, and with it the connection of its other engines."""
        for group in [group for group in self._groups if link in group.links]:
            self._groups.remove(group)
            group.abandon()

    def close(self) -> None:
        """Leave every group."""
        for group in self._groups:
            group.close()
        self._groups.clear()
