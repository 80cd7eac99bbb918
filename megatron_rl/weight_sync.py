"""The trainer's side of versioned weight sync.

Invariant: versions count up by one from 0, which is the start checkpoint sent to every engine before its first prompt;
after `push` every engine serves the command's version or the run ends.
"""

from __future__ import annotations

import socket
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_rl.contracts import Sync
from megatron_rl.worker import Worker
from sglang_bridge.admin import AdminClient
from sglang_bridge.handle import EngineHandle
from sglang_bridge.keys import RunKeys
from sglang_bridge.weights.disk import DiskTransport
from sglang_bridge.weights.distributed import DistributedTransport
from sglang_bridge.weights.transport import WeightTransport, refuse_ipc
from sglang_bridge.weights.updater import WeightUpdater


class WeightSync:
    """Rank 0's. dtype: the engines' weights. audit_every: syncs between audits by value; the first always has one."""

    def __init__(self, updater: WeightUpdater, *, dtype: torch.dtype, audit_every: int) -> None:
        self._updater = updater
        self._audit_every = audit_every
        self._next_version = 0
        self.dtype = dtype

    def next_command(self) -> Sync:
        """What to tell every rank next."""
        version = self._next_version
        self._next_version += 1
        audit = version == 0 or (self._audit_every > 0 and version % self._audit_every == 0)
        return Sync(version=version, audit=audit)

    def push(self, command: Sync, worker: Worker) -> dict[str, float]:
        """Take part in the export as its source; returns metrics. Raises `WeightUpdateFailed` or `WeightMismatch`."""
        self._updater.push(worker.export(self.dtype), command.version)
        return {"sync/version": float(command.version)}

    def close(self) -> None:
        self._updater.close()


def build_updater(
    handles: Sequence[EngineHandle],
    keys: RunKeys,
    *,
    transport: str,
    bucket_mb: float,
    timeout_s: float,
    directory: Path,
    model_path: Path,
    device: torch.device,
) -> WeightUpdater:
    """The updater of `sync.transport`: distributed (broadcast) or disk (through `directory`)."""
    admins = [
        AdminClient(handle.url, api_key=keys.api_key, admin_api_key=keys.admin_api_key, timeout=timeout_s)
        for handle in handles
    ]
    chosen: WeightTransport
    if transport == "distributed":
        on_gpu = device.type == "cuda"
        chosen = DistributedTransport(
            address=_address_towards(handles[0].url),
            backend="nccl" if on_gpu else "gloo",
            timeout_seconds=timeout_s,
            device=device if on_gpu else None,
        )
    elif transport == "disk":
        chosen = DiskTransport(directory=directory, config_from=model_path, timeout_seconds=timeout_s)
    else:
        chosen = refuse_ipc()
    return WeightUpdater(handles, admins, transport=chosen, bucket_bytes=int(bucket_mb * 2**20))


def _address_towards(url: str) -> str:
    """This machine's address as the engine at `url` sees it."""
    parts = urllib.parse.urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))  # sends nothing, only picks the route
        return str(probe.getsockname()[0])
