"""Sends weights to the engines under increasing versions, and audits what the engines hold."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from megatron_rl.config.schema import EngineSettings, SyncSettings
from megatron_rl.contracts.commands import Sync
from megatron_rl.mcore.dtypes import torch_dtype
from megatron_rl.models.shape import ModelShape
from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import AuditUnsupported
from sglang_bridge.keys import RunKeys
from sglang_bridge.weights.audit import audit_engine, value_obstacles
from sglang_bridge.weights.disk import DiskTransport
from sglang_bridge.weights.distributed import DistributedTransport
from sglang_bridge.weights.expectation import WeightExpectation
from sglang_bridge.weights.transport import WeightTransport
from sglang_bridge.weights.updater import WeightUpdater

NamedTensors = Iterator[tuple[str, torch.Tensor]]


class Sender(Protocol):
    """A rank's part in a collective export of the weights. Every rank consumes the export."""

    def send(self, command: Sync, weights: NamedTensors) -> dict[str, float]:
        """Consume the export; returns metrics."""
        ...


class MakeExpectation(Protocol):
    """Makes an empty record of the weights that engines must hold."""

    def __call__(self, *, compares_values: bool) -> WeightExpectation: ...


class FollowerSync:
    """Takes part in the export on all ranks but rank 0, and sends nothing."""

    def send(self, command: Sync, weights: NamedTensors) -> dict[str, float]:
        """Consume the export without keeping a tensor. Returns no metrics."""
        collections.deque(weights, maxlen=0)
        return {}


class WeightSync:
    """Sends the weights from rank 0 to every engine.

    Versions count up by one from 0, the start checkpoint, which every engine receives before its
    first prompt.

    make_expectation: makes an empty record of the weights that engines must hold, for one audit.
        Its argument is False if names alone are compared.
    audit_obstacle: the reason why an audit compared names only. The reason stays the same, so that
        all further audits compare names only.
    """

    def __init__(
        self,
        updater: WeightUpdater,
        settings: SyncSettings,
        *,
        make_expectation: MakeExpectation,
    ) -> None:
        self._updater = updater
        self._settings = settings
        self._make_expectation = make_expectation
        self._next_version = 0
        self._is_first = True
        self.audit_obstacle = ""

    @property
    def version(self) -> int | None:
        """The last version that was sent; None before the first."""
        return self._next_version - 1 if self._next_version else None

    def resume_from(self, version: int | None, *, synced: bool) -> None:
        """Continue the versions of a run that is resumed.

        version: the last version that its engines received. synced: the weights of the checkpoint
        have this version, so they are sent under it again.
        """
        if version is None:
            self._next_version = 0
        else:
            self._next_version = version if synced else version + 1

    def next_command(self) -> Sync:
        """The next command for all ranks. The first sync is always audited."""
        version = self._next_version
        every = self._settings.audit_every
        is_first = self._is_first
        self._next_version += 1
        self._is_first = False
        return Sync(version=version, audit=is_first or (every > 0 and version % every == 0))

    def send(self, command: Sync, weights: NamedTensors) -> dict[str, float]:
        """Send one export to every engine, and audit it if the command says so.

        Returns metrics. Raises `WeightUpdateFailed` and `WeightMismatch`.
        """
        values = {"sync/version": float(command.version)}
        if not command.audit:
            self._updater.push(weights, command.version)
            return values
        expectation = self._make_expectation(compares_values=self._can_compare_values())
        self._updater.push(expectation.observe(weights), command.version)
        num_compared = self._audit(expectation, command.version)
        if not self.audit_obstacle:
            values["sync/audit_mismatches"] = 0.0
            values["sync/audit_compared"] = float(num_compared)
        return values

    def close(self) -> None:
        """Disconnect from every engine."""
        self._updater.close()

    def _can_compare_values(self) -> bool:
        """False if an engine, or an earlier audit, rules out that values are compared."""
        engines = (admin.engine for admin in self._updater.admins)
        return not self.audit_obstacle and not any(map(value_obstacles, engines))

    def _audit(self, expectation: WeightExpectation, version: int) -> int:
        """Audit every engine; returns the number of parameters that were compared.

        Raises `WeightMismatch`.
        """
        num_compared = 0
        for admin in self._updater.admins:
            try:
                report = audit_engine(admin, expectation)
            except AuditUnsupported as obstacle:
                self.audit_obstacle = str(obstacle)
            else:
                report.raise_on_mismatch(version)
                num_compared += report.num_compared
        return num_compared


def open_weight_sync(
    engines: Sequence[Engine],
    keys: RunKeys,
    settings: SyncSettings,
    engine_settings: EngineSettings,
    shape: ModelShape,
    *,
    directory: Path,
    model_path: Path,
    device: torch.device,
) -> WeightSync:
    """Open weight sync from this process to `engines`, over the transport of `sync.transport`.

    directory: for the disk transport, on a file system that the engines share. device: the device
    of this rank.
    """
    admins = [AdminClient(engine, keys, timeout=settings.timeout_s) for engine in engines]
    on_gpu = device.type == "cuda"
    if settings.transport == "disk":
        transport: WeightTransport = DiskTransport(
            directory=directory, config_from=model_path, timeout_seconds=settings.timeout_s
        )
    else:
        transport = DistributedTransport(
            backend="nccl" if on_gpu else "gloo",
            timeout_seconds=settings.timeout_s,
            device=device if on_gpu else None,
        )
    bucket_bytes = int(settings.bucket_mb * 2**20)
    updater = WeightUpdater(admins, transport=transport, bucket_bytes=bucket_bytes)

    def make_expectation(*, compares_values: bool) -> WeightExpectation:
        return WeightExpectation(
            dtype=torch_dtype(engine_settings.dtype),
            num_experts=shape.num_experts,
            device="cuda" if on_gpu else "cpu",
            compares_values=compares_values,
        )

    return WeightSync(updater, settings, make_expectation=make_expectation)
