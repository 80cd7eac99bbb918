"""Sends an owner's tensors over process groups that it shares with the engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from sglang_bridge.admin import AdminClient
from sglang_bridge.errors import RequestFailed
from sglang_bridge.weights.buckets import NamedTensors, iterate_buckets
from sglang_bridge.weights.calls import Failures, call_each
from sglang_bridge.weights.courier import Courier, Lane
from sglang_bridge.weights.crew import SendReport
from sglang_bridge.weights.weight_group import WeightGroup

Tree = tuple[AdminClient, ...]
# One is gathered while the other is sent.
_BUCKETS = 2


class DistributedTransport:
    """Sends weights by broadcast. backend: "gloo" on CPUs, "nccl" on GPUs. device: the rank's GPU.

    timeout_seconds: of forming a group, and of an update. log: writes a line about a long wait.
    engines_per_tree: engines that get a bucket in one broadcast, and fail together. With 1, each
    engine has a group of its own.

    Raises `ValueError` for another backend, or one that does not fit the device.
    """

    def __init__(
        self,
        *,
        backend: str,
        timeout_seconds: float,
        device: torch.device | None = None,
        log: Callable[[str], None] = print,
        engines_per_tree: int = 1,
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
        self._engines_per_tree = engines_per_tree
        self._groups: dict[Tree, WeightGroup] = {}

    def connect(self, admins: Sequence[AdminClient]) -> Failures:
        """Open groups for the engines that have none, all at once.

        Engines that shared a tree with one that is gone get a new tree.
        """
        failures = self._unready(admins)
        ready = [admin for admin in admins if admin.url not in failures]
        trees = self._trees(ready)
        self._drop_old_trees(trees, ready)
        new_trees = {tree[0]: tree for tree in trees if tree not in self._groups}
        groups: dict[Tree, WeightGroup] = {}

        def open_group(first: AdminClient) -> None:
            tree = new_trees[first]
            groups[tree] = WeightGroup.open(
                tree,
                backend=self._backend,
                timeout=self.timeout_seconds,
                joining=self._joining,
            )

        reasons = call_each(list(new_trees), open_group)
        self._groups |= groups
        for first, tree in new_trees.items():
            if first.url in reasons:
                failures |= {admin.url: reasons[first.url] for admin in tree}
        return failures

    def _drop_old_trees(self, trees: Sequence[Tree], ready: Sequence[AdminClient]) -> None:
        """Leave the groups of engines that get another one. Groups of other engines stay."""
        for tree in list(self._groups):
            if tree in trees or not any(admin in ready for admin in tree):
                continue
            group = self._groups.pop(tree)
            if all(admin in ready for admin in tree):
                group.close()
            else:  # one of them may not answer
                group.abandon()

    def _trees(self, admins: Sequence[AdminClient]) -> list[Tree]:
        size = self._engines_per_tree
        return [tuple(admins[start : start + size]) for start in range(0, len(admins), size)]

    def _unready(self, admins: Sequence[AdminClient]) -> Failures:
        """Find engines that would keep the others of a new tree waiting."""
        if self._engines_per_tree == 1:
            return {}
        return call_each(admins, lambda admin: admin.weight_version())

    def begin(self, admins: Sequence[AdminClient], version: int, deadline: float) -> Failures:
        """Open a session on every engine and wait for the replies.

        An engine without a session would leave the broadcast waiting.
        """
        return call_each(admins, _begin, deadline=deadline)

    def send(
        self,
        tensors: NamedTensors,
        admins: Sequence[AdminClient],
        version: int,
        *,
        bucket_bytes: int,
        deadline: float,
    ) -> SendReport:
        """Send tensors to engines, in turns in their order.

        The bytes of a tree are counted once, under its first engine.
        """
        failures, groups = self._whole_groups(admins)
        lanes = [Lane([admin.url for admin in group.admins], group) for group in groups]
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
            failures=failures | courier.failures,
            bytes_sent={lane.urls[0]: lane.num_bytes for lane in lanes},
            seconds=courier.seconds,
        )

    def _whole_groups(self, admins: Sequence[AdminClient]) -> tuple[Failures, list[WeightGroup]]:
        """Return the groups of engines, in their order, and the engines whose tree lacks another.

        A broadcast to a tree waits for all of its engines.
        """
        failures: Failures = {}
        groups: list[WeightGroup] = []
        for admin in admins:
            group = self._group_of(admin)
            lacking = [other.url for other in group.admins if other not in admins]
            if lacking:
                failures[admin.url] = (
                    f"it shares a tree with {', '.join(lacking)}, which failed "
                    "(sync.engines_per_tree)"
                )
            elif group not in groups:
                groups.append(group)
        return failures, groups

    def _group_of(self, admin: AdminClient) -> WeightGroup:
        return next(group for tree, group in self._groups.items() if admin in tree)

    def end(self, admins: Sequence[AdminClient], version: int, deadline: float) -> Failures:
        """Close the session."""
        return call_each(admins, lambda admin: admin.end_weight_update(), deadline=deadline)

    def forget(self, admin: AdminClient) -> None:
        """Drop the engine's group, and with it its tree."""
        for tree in list(self._groups):
            if admin in tree:
                self._groups.pop(tree).abandon()

    def close(self) -> None:
        """Leave every group."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()


def _begin(admin: AdminClient) -> None:
    """Open a session. One that is open belongs to another trainer: old ones are closed before."""
    try:
        admin.begin_weight_update()
    except RequestFailed as error:
        if "already open" in str(error):
            raise RequestFailed(
                f"{error}: another trainer updates this engine. Give each run engines of its own"
            ) from error
        raise
