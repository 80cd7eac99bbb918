"""Places the managed engines of a node on its devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_rl.config.schema import EngineSettings, ModelSettings
from megatron_rl.engines.quantization import require_fp8_gpu
from megatron_rl.mcore.job import Job
from sglang_bridge.addresses import node_address
from sglang_bridge.settings import ServerPlace, server_device


def server_places(
    engine: EngineSettings,
    model: ModelSettings,
    job: Job,
    *,
    seed: int,
    return_routes: bool,
    quantization: Mapping[str, Any] | None = None,
    memory_fraction: float | None = None,
) -> list[ServerPlace]:
    """One place for each managed engine of this node.

    With GPUs, each engine gets `engine.tp` devices in order. If `engine.colocated` is set, they are
    the devices of the node's ranks, else the devices behind them. Nodes that share engines have
    equal parts of these devices. Every engine of the run samples with its own
    seed, derived from `seed`.

    quantization: the `quantization_config` of every engine, None for unquantized ones. Raises
    `Failure` if this node's GPUs cannot serve it. memory_fraction: see `ServerPlace`.
    """
    device = server_device(torch.cuda.device_count())
    if quantization is not None and device == "cuda":
        require_fp8_gpu(torch.cuda.get_device_capability(), torch.cuda.get_device_name())
    group, server_rank = divmod(job.node, engine.nodes_per_engine)
    num_gpus = engine.tp // engine.nodes_per_engine
    places = []
    for index in range(engine.count):
        first_gpu = (0 if engine.colocated else job.local_world_size) + index * num_gpus
        gpus = tuple(range(first_gpu, first_gpu + num_gpus))
        place = ServerPlace(
            model_path=model.path,
            device=device,
            node=job.node,
            host=node_address(job.num_nodes),
            gpus=gpus if device == "cuda" else (),
            return_routes=return_routes,
            load_format="dummy" if model.init == "random" else None,
            quantization=quantization,
            seed=(seed + group * engine.count + index) % 2**32,
            memory_fraction=memory_fraction,
            num_servers=engine.nodes_per_engine,
            server_rank=server_rank,
        )
        places.append(place)
    return places
