"""The trainer's side of versioned weight sync."""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_rl.contracts.commands import Sync
from megatron_rl.mcore.weights.export import NamedTensors
from sglang_bridge.addresses import LOOPBACK, address_towards
from sglang_bridge.admin import AdminClient
from sglang_bridge.errors import AuditUnsupported, WeightMismatch
from sglang_bridge.handle import EngineHandle
from sglang_bridge.keys import RunKeys
from sglang_bridge.weights.audit import AuditReport, audit_engine
from sglang_bridge.weights.disk import DiskTransport
from sglang_bridge.weights.distributed import DistributedTransport
from sglang_bridge.weights.expectation import WeightExpectation
from sglang_bridge.weights.locate import push_and_locate
from sglang_bridge.weights.transport import WeightTransport, refuse_ipc
from sglang_bridge.weights.updater import WeightUpdater


class WeightSync:
    """Rank 0's. dtype: the engines' weights. audit_every: syncs between audits; the first always has one."""

    def __init__(
        self,
        engines: Sequence[tuple[EngineHandle, AdminClient]],
        updater: WeightUpdater,
        *,
        dtype: torch.dtype,
        num_experts: int,
        audit_every: int,
    ) -> None:
        self._engines = engines
        self._updater = updater
        self._num_experts = num_experts
        self._audit_every = audit_every
        self._next_version = 0
        self._suspects: dict[str, AuditReport] = {}
        self.dtype = dtype
        self.audit_obstacle = ""

    def next_command(self) -> Sync:
        """What to tell every rank next."""
        version = self._next_version
        self._next_version += 1
        audit = version == 0 or (self._audit_every > 0 and version % self._audit_every == 0)
        return Sync(version=version, audit=audit)

    @property
    def must_locate(self) -> bool:
        """The last audit found a difference: send the same command again and call `locate`."""
        return bool(self._suspects)

    def push(self, command: Sync, weights: NamedTensors) -> dict[str, float]:
        """Send one export to every engine and audit it if told to; returns metrics. Raises `WeightUpdateFailed`."""
        values = {"sync/version": float(command.version)}
        engines = [self._engines[i] for i in command.engines] or self._engines
        urls = {handle.url for handle, _ in engines}
        if not command.audit or self.audit_obstacle:
            self._updater.push(weights, command.version, urls=urls)
            return values
        expectation = WeightExpectation(dtype=self.dtype, num_experts=self._num_experts)
        self._updater.push(expectation.observe(weights), command.version, urls=urls)
        try:
            reports = [audit_engine(handle, admin, expectation) for handle, admin in engines]
        except AuditUnsupported as obstacle:
            self.audit_obstacle = str(obstacle)
            return values
        self._suspects = {report.url: report for report in reports if report.mismatches}
        return values | {
            "sync/audit_mismatches": float(sum(len(report.mismatches) for report in reports)),
            "sync/audit_compared": float(sum(report.compared for report in reports)),
        }

    def locate(self, command: Sync, weights: NamedTensors) -> None:
        """Send the same export again, which mends the engines, and raise `WeightMismatch` naming what was wrong."""
        located = push_and_locate(self._updater, weights, command.version, self._suspects)
        url, tensors = next(iter(located.items()))
        raise WeightMismatch(url, command.version, tensors or self._suspects[url].tensors)

    def close(self) -> None:
        self._updater.close()


def build_weight_sync(
    handles: Sequence[EngineHandle],
    keys: RunKeys,
    *,
    transport: str,
    bucket_mb: float,
    timeout_s: float,
    directory: Path,
    model_path: Path,
    device: torch.device,
    dtype: torch.dtype,
    num_experts: int,
    audit_every: int,
) -> WeightSync:
    """Sync by `transport`: distributed (broadcast) or disk (through `directory`, which the engines share)."""
    admins = [
        AdminClient(handle.url, api_key=keys.api_key, admin_api_key=keys.admin_api_key, timeout=timeout_s)
        for handle in handles
    ]
    chosen: WeightTransport
    if transport == "distributed":
        on_gpu = device.type == "cuda"
        chosen = DistributedTransport(
            address=_address_seen_by(handles[0]),
            backend="nccl" if on_gpu else "gloo",
            timeout_seconds=timeout_s,
            device=device if on_gpu else None,
        )
    elif transport == "disk":
        chosen = DiskTransport(directory=directory, config_from=model_path, timeout_seconds=timeout_s)
    else:
        chosen = refuse_ipc()
    updater = WeightUpdater(handles, admins, transport=chosen, bucket_bytes=int(bucket_mb * 2**20))
    engines = list(zip(handles, admins, strict=True))
    return WeightSync(engines, updater, dtype=dtype, num_experts=num_experts, audit_every=audit_every)


def _address_seen_by(engine: EngineHandle) -> str:
    """Where an engine finds this process's rendezvous."""
    parts = urllib.parse.urlsplit(engine.url)
    return address_towards(parts.hostname or LOOPBACK, parts.port or 80)
