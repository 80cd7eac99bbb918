"""Opens a rank's part in weight syncs: its transport, and its talk with the other ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.config.schema import EngineSettings, SyncSettings
from megatron_rl.mcore.collectives import broadcast_bytes, gather_bytes
from megatron_rl.mcore.dtypes import torch_dtype
from megatron_rl.mcore.job import Job
from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.keys import RunKeys
from sglang_bridge.weights.disk import DiskTransport
from sglang_bridge.weights.distributed import DistributedTransport
from sglang_bridge.weights.fused_layout import engine_dtype
from sglang_bridge.weights.ipc.transport import IpcTransport
from sglang_bridge.weights.part import RankPart
from sglang_bridge.weights.transport import WeightTransport


class GroupCrew:
    """The ranks of a job. See `Crew`."""

    def __init__(self, rank: int, group: dist.ProcessGroup) -> None:
        self.rank = rank
        self._group = group

    def tell(self, data: bytes | None) -> bytes:
        """See `Crew`."""
        return broadcast_bytes(data, self._group)

    def gather(self, data: bytes) -> list[bytes]:
        """See `Crew`."""
        return gather_bytes(data, self._group)


def open_rank_part(
    job: Job,
    keys: RunKeys,
    settings: SyncSettings,
    engine_settings: EngineSettings,
    *,
    directory: Path,
    model_path: Path,
    log: Callable[[str], None],
    transport: WeightTransport | None = None,
) -> RankPart:
    """Open this rank's part in weight syncs, over the transport of `sync.transport`.

    directory: for the disk transport, on a file system that ranks and engines share. log: writes a
    line for people. transport: another one.
    """
    crew = GroupCrew(job.rank, job.control_group)
    if transport is None:
        transport = _open_transport(job, crew, settings, directory, model_path, log)

    def open_admin(engine: Engine) -> AdminClient:
        return AdminClient(engine, keys, timeout=settings.timeout_s)

    dtype = torch_dtype(engine_settings.dtype)

    def dtype_of(name: str) -> torch.dtype:
        return engine_dtype(name, dtype)

    return RankPart(
        transport,
        crew,
        bucket_bytes=int(settings.bucket_mb * 2**20),
        open_admin=open_admin,
        # The stream of quantized weights checks its own
        dtype_of=dtype_of if engine_settings.quantization is None else None,
        # Engines take the broadcasts of several owners in any order, and would wait for each other
        is_central=settings.transport == "delta" or settings.engines_per_tree > 1,
        is_everywhere=settings.transport == "ipc",
        free_memory=partial(_free_memory, job.device)
        if engine_settings.colocated
        else _keep_memory,
    )


def _open_transport(
    job: Job,
    crew: GroupCrew,
    settings: SyncSettings,
    directory: Path,
    model_path: Path,
    log: Callable[[str], None],
) -> WeightTransport:
    on_gpu = job.device.type == "cuda"
    if settings.transport in ("disk", "delta"):
        return DiskTransport(
            directory=directory,
            config_from=model_path,
            timeout_seconds=settings.timeout_s,
            rank=job.rank,
        )
    if settings.transport == "ipc":
        return IpcTransport(
            crew=crew,
            node=job.node,
            gpu=job.local_rank,
            device=job.device,
            timeout_seconds=settings.timeout_s,
            log=log,
        )
    return DistributedTransport(
        backend="nccl" if on_gpu else "gloo",
        timeout_seconds=settings.timeout_s,
        device=job.device if on_gpu else None,
        log=log,
        engines_per_tree=settings.engines_per_tree,
    )


def _free_memory(device: torch.device) -> None:
    """Give memory that no tensor uses back to the device, for other processes on it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def _keep_memory() -> None:
    """Do nothing: no engine uses this rank's device."""
