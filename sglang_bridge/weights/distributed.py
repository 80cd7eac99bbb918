"""Broadcasts buckets over a process group that the trainer shares with each engine."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from sglang_bridge.admin import AdminClient
from sglang_bridge.errors import EngineError
from sglang_bridge.weights.buckets import Bucket
from sglang_bridge.weights.calls import Failures, call_each
from sglang_bridge.weights.weight_group import WeightGroup


class DistributedTransport:
    """Sends weights by broadcast. backend: "gloo" on CPUs, "nccl" on GPUs. device: the rank's GPU.

    Raises `ValueError` for another backend, or one that does not fit the device.
    """

    def __init__(
        self, *, backend: str, timeout_seconds: float, device: torch.device | None = None
    ) -> None:
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"weight transport backend {backend!r}: gloo (CPU) or nccl (GPU)")
        if (backend == "nccl") != (device is not None and device.type == "cuda"):
            raise ValueError(
                f"weight transport backend {backend!r} with device {device}: nccl needs a GPU, "
                "gloo needs none"
            )
        self._backend = backend
        self._timeout = timeout_seconds
        self._device = device or torch.device("cpu")
        self._groups: dict[AdminClient, WeightGroup] = {}

    @property
    def device(self) -> torch.device:
        """The device on which buckets must be."""
        return self._device

    def connect(self, admins: Sequence[AdminClient]) -> Failures:
        """Open groups for the engines that have none."""
        failures: Failures = {}
        for admin in admins:
            if admin in self._groups:
                continue
            try:
                group = WeightGroup.open(admin, backend=self._backend, timeout=self._timeout)
            except (EngineError, OSError) as error:  # OSError: no route to the host
                failures[admin.url] = str(error)
            else:
                self._groups[admin] = group
        return failures

    def begin(self, admins: Sequence[AdminClient], version: int) -> Failures:
        """Open a session on every engine and wait for the replies.

        An engine without a session would leave the broadcast waiting.
        """
        return call_each(admins, lambda admin: admin.begin_weight_update())

    def send(self, bucket: Bucket, admins: Sequence[AdminClient], version: int) -> Failures:
        """Broadcast one bucket to all engines at once and wait until each has loaded it."""
        deadline = time.monotonic() + self._timeout
        label = str(version) if bucket.last else None
        deliveries = {admin.url: self._groups[admin].deliver(bucket, label) for admin in admins}
        reasons = {url: delivery.finish(deadline) for url, delivery in deliveries.items()}
        return {url: reason for url, reason in reasons.items() if reason is not None}

    def end(self, admins: Sequence[AdminClient], version: int) -> Failures:
        """Close the session."""
        return call_each(admins, lambda admin: admin.end_weight_update())

    def forget(self, admin: AdminClient) -> None:
        """Drop the engine's group."""
        group = self._groups.pop(admin, None)
        if group is not None:
            group.abandon()

    def close(self) -> None:
        """Leave every group."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()
