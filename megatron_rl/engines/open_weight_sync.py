"""Opens weight sync over the transport that the configuration names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_rl.config.schema import EngineSettings, SyncSettings
from megatron_rl.engines.weight_sync import WeightSync
from megatron_rl.mcore.dtypes import torch_dtype
from megatron_rl.models.shape import ModelShape
from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.keys import RunKeys
from sglang_bridge.weights.disk import DiskTransport
from sglang_bridge.weights.distributed import DistributedTransport
from sglang_bridge.weights.expectation import WeightExpectation
from sglang_bridge.weights.transport import WeightTransport
from sglang_bridge.weights.updater import WeightUpdater


def open_weight_sync(
    engines: Sequence[Engine],
    keys: RunKeys,
    settings: SyncSettings,
    engine: EngineSettings,
    shape: ModelShape,
    *,
    directory: Path,
    model_path: Path,
    device: torch.device,
) -> WeightSync:
    """Weight sync from this process to `engines`.

    directory: for the disk transport, on a file system they share.
    """
    admins = [AdminClient(e, keys, timeout=settings.timeout_s) for e in engines]
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
    return WeightSync(
        WeightUpdater(admins, transport=transport, bucket_bytes=int(settings.bucket_mb * 2**20)),
        settings,
        expect=lambda: WeightExpectation(
            dtype=torch_dtype(engine.dtype),
            num_experts=shape.num_experts,
            device="cuda" if on_gpu else "cpu",
        ),
    )
