"""Script for torchrun: the ranks of each grid in turn send their weights to engines.

Usage: lanes_of_ranks.py OUT BUCKET_BYTES URLS CASE...; URLS are separated by commas, and a case is
MODEL,GRID,DTYPE. Rank R writes OUT/GRID-DTYPE-R.json. DTYPE is for trainer and engines. "fp8:" in
front of it quantizes what engines get. The engines are those of `tests.support.weight_receiver`.
Rank 0 also reports the state of each before and after.
"""

from __future__ import annotations

import collections
import hashlib
import json
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.mcore import compat

compat.install()

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.utils._python_dispatch import TorchDispatchMode

from launch.rehearsal.memory_meter import MemoryMeter
from megatron_rl.config.schema import EngineSettings, ModelSettings, ParallelSettings, SyncSettings
from megatron_rl.contracts.commands import Sync
from megatron_rl.engines.rank_part import open_rank_part
from megatron_rl.engines.weight_sync import FollowerSync
from megatron_rl.mcore import parallel
from megatron_rl.mcore.model import build_models
from megatron_rl.mcore.weights import (
    OwnedWeights,
    initialize_hf_weights,
    iterate_hf_weights,
    open_engine_weights,
)
from megatron_rl.models.families import read_shape
from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.keys import RunKeys
from sglang_bridge.weights.part import RankPart
from sglang_bridge.weights.updater import WeightUpdater

GRIDS: dict[str, dict[str, Any]] = {
    "single": {},
    "ep2": {"ep": 2},
    "pp2": {"pp": 2},
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "ep4": {"ep": 4},
    "pp2_vpp2_ep2": {"pp": 2, "vpp": 2, "ep": 2},
    "tp2_ep2": {"tp": 2, "ep": 2},
    "tp2_ep2_etp2": {"tp": 2, "ep": 2, "etp": 2},
    "tp2_pp2": {"tp": 2, "pp": 2},
}
KEYS = RunKeys("key", "admin-key")


class AllocationMeter(TorchDispatchMode):
    """Counts the bytes of living storages that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = MemoryMeter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, Sequence) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.meter.add(tensor)
        return result


class CollectiveCounter:
    """Counts the collectives of tensors by name and by the number of ranks."""

    def __init__(self) -> None:
        self.counts = collections.Counter[str]()
        for name in ("all_gather", "gather", "broadcast", "all_gather_into_tensor", "all_reduce"):
            setattr(dist, name, self._wrap(name, getattr(dist, name)))

    def _wrap(self, name: str, function: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            tensor = args[0][0] if isinstance(args[0], list) else args[0]
            if tensor.dtype.is_floating_point:
                self.counts[f"{name} of {dist.get_world_size(kwargs.get('group'))}"] += 1
            return function(*args, **kwargs)

        return count


def checksum(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {hashlib.sha256(data).hexdigest()[:16]}"


def read_rank_zero(weights: OwnedWeights) -> Iterator[tuple[str, str]]:
    for name, tensor in weights.stream_all():
        yield name, checksum(tensor)


def make_engine_settings(dtype: str) -> EngineSettings:
    """The settings of engines that get weights of this dtype."""
    name = dtype.removeprefix("fp8:")
    options: dict[str, Any] = {"dtype": name, "quantization": None if name == dtype else "fp8"}
    return EngineSettings(**options)


def read_streams(weights: OwnedWeights) -> dict[str, Any]:
    """Read the streams to rank 0 and to every rank. A tensor is valid until the next one."""
    on_rank_zero = dict(read_rank_zero(weights))
    everywhere = ((name, checksum(tensor)) for name, tensor in weights.stream_everywhere())
    return {"on_rank_zero": on_rank_zero, "on_every_rank": list(everywhere)}


def open_weights(
    model: Path, grid: str, dtype: str, bucket_bytes: int
) -> tuple[parallel.RankLayout, OwnedWeights]:
    """Build this rank's part of a random model. Collective."""
    settings = ParallelSettings(timeout_s=60, **GRIDS[grid])
    layout = parallel.initialize(settings, seed=0)
    shape = read_shape(model)
    engine = make_engine_settings(dtype)
    options: dict[str, Any] = {"dtype": engine.dtype}
    models = build_models(shape, ModelSettings(path=str(model), **options), settings)
    initialize_hf_weights(models, shape, seed=3)
    return layout, open_engine_weights(models, shape, layout, engine, bucket_bytes=bucket_bytes)


def open_part(
    layout: parallel.RankLayout, out: Path, model: Path, dtype: str, bucket_bytes: int
) -> RankPart:
    """Open this rank's part in syncs."""
    return open_rank_part(
        layout,
        KEYS,
        SyncSettings(bucket_mb=bucket_bytes / 2**20, timeout_s=50),
        make_engine_settings(dtype),
        directory=out / "sync",
        model_path=model,
        log=print,
    )


def send(part: RankPart, weights: OwnedWeights, urls: Sequence[str]) -> dict[str, Any]:
    """Send the weights once. Rank 0 returns what was sent over each link."""
    if part.crew.rank:
        FollowerSync(part).send(Sync(version=5), weights)
        return {}
    updater = WeightUpdater(part)
    admins = [AdminClient(Engine(url=url), KEYS, timeout=50) for url in urls]
    updater.push(weights, 5, admins)
    items = updater.summary.bytes_sent.items()
    return {"bytes": {f"{rank} {url}": count for (rank, url), count in items}}


def open_meter(weights: OwnedWeights) -> AllocationMeter:
    """Open a meter that knows the shard of this rank."""
    meter = AllocationMeter()
    for chunk in weights.models:
        for parameter in (*chunk.parameters(), *chunk.buffers()):
            meter.meter.add(parameter)
    return meter


def read_engines(urls: Sequence[str]) -> list[dict[str, Any]]:
    """Read the states of the engines."""
    states = []
    for url in urls:
        with urllib.request.urlopen(f"{url}/state", timeout=30) as response:
            states.append(json.load(response))
    return states


def run_case(
    case: Sequence[str],
    out: Path,
    bucket_bytes: int,
    urls: Sequence[str],
    counter: CollectiveCounter,
) -> None:
    """Send, and write what this rank did and what it holds."""
    model, grid, dtype = case
    layout, weights = open_weights(Path(model), grid, dtype, bucket_bytes)
    counter.counts.clear()
    part = open_part(layout, out / f"{grid}-{dtype}", Path(model), dtype, bucket_bytes)
    meter = open_meter(weights)
    report: dict[str, Any] = {"shard": meter.meter.current.total()}
    if layout.rank == 0:
        report["engines_before"] = read_engines(urls)
    with meter:
        report |= send(part, weights, urls)
    report["peak"] = meter.meter.peak.total()
    report["collectives"] = dict(counter.counts)
    if layout.rank == 0:
        report["engines"] = read_engines(urls)
    # One rank with everything would send these bits
    stage = iterate_hf_weights(weights.models, weights.shape, weights.dtype)
    whole = weights.transform(stage)
    report["of_stage"] = {name: checksum(tensor) for name, tensor in whole}
    report |= read_streams(weights)
    report["largest"] = max(
        parameter.num_whole_bytes(parameter.layout(0), weights.dtype)
        for parameters in weights._units.values()
        for parameter in parameters
    )
    (out / f"{grid}-{dtype}-{layout.rank}.json").write_text(json.dumps(report))
    part.close()
    parallel_state.destroy_model_parallel()


def main() -> None:
    out, bucket_bytes, urls, *cases = sys.argv[1:]
    counter = CollectiveCounter()
    for case in cases:
        run_case(case.split(","), Path(out), int(bucket_bytes), urls.split(","), counter)
    parallel.shutdown()


if __name__ == "__main__":
    main()
