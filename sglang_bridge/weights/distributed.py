"""Sends an owner's tensors over process groups that it shares with each engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from sglang_bridge.admin import AdminClient
from sglang_bridge.weights.buckets import NamedTensors, iterate_buckets
from sglang_bridge.weights.calls import Failures, call_each
from sglang_bridge.weights.courier import Courier, Lane
from sglang_bridge.weights.crew import SendReport
from sglang_bridge.weights.weight_group import WeightGroup

# One is gathered while the other is sent.
_BUCKETS = 2


class DistributedTransport:
    """Sends weights by broadcast. backend: "gloo" on CPUs, "nccl" on GPUs. device: the rank's GPU.

    timeout_seconds: of forming a group, and of an update. log: writes a line about a long wait.

    Raises `ValueError` for another backend, or one that does not fit the device.
    """

    def __init__(
        self,
        *,
        backend: str,
        timeout_seconds: float,
        device: torch.device | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"weight transport backend {backend!r}: gloo (CPU) or nccl (GPU)")
        if (backend == "nccl") != (device is not None and device.type == "cuda"):
            raise ValueError(
                f"weight transport backend {backend!r} with device {device}: nccl needs a GPU, "
                "gloo needs none"
            )
        self.timeout_seconds = timeout_seconds
        self._backend = backend
        self._device = device or torch.device("cpu")
        self._log = log
        self._joining = threading.Lock()
        self._groups: dict[AdminClient, WeightGroup] = {}

    def connect(self, admins: Sequence[AdminClient]) -> Failures:
        """Open groups for the engines that have none, all at once."""
        groups: dict[AdminClient, WeightGroup] = {}

        def connect_one(admin: AdminClient) -> None:
            groups[admin] = WeightGroup.open(
                admin,
                backend=self._backend,
                timeout=self.timeout_seconds,
                joining=self._joining,
            )

        failures = call_each([admin for admin in admins if admin not in self._groups], connect_one)
        self._groups |= groups
        return failures

    def begin(self, admins: Sequence[AdminClient], version: int, deadline: float) -> Failures:
        """Open a session on every engine and wait for the replies.

        An engine without a session would leave the broadcast waiting.
        """
        return call_each(admins, lambda admin: admin.begin_weight_update(), deadline=deadline)

    def send(
        self,
        tensors: NamedTensors,
        admins: Sequence[AdminClient],
        version: int,
        *,
        bucket_bytes: int,
        deadline: float,
    ) -> SendReport:
        """Send tensors to engines, in turns in their order."""
        lanes = [Lane(admin.url, self._groups[admin]) for admin in admins]
        courier = Courier(lanes, deadline, self._device, self._log)
        num_tensors = 0
        try:
            for bucket in iterate_buckets(
                tensors, bucket_bytes=bucket_bytes, device=self._device, slots=_BUCKETS
            ):
                num_tensors += len(bucket.names)
                courier.put(bucket)
        finally:
            courier.finish()
        return SendReport(
            num_tensors=num_tensors,
            failures=courier.failures,
            bytes_sent={lane.url: lane.num_bytes for lane in lanes},
            seconds=courier.seconds,
        )

    def end(self, admins: Sequence[AdminClient], version: int, deadline: float) -> Failures:
        """Close the session."""
        return call_each(admins, lambda admin: admin.end_weight_update(), deadline=deadline)

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
