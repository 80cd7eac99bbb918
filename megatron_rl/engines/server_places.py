"""Places the managed engines of a node on its devices."""

from __future__ import annotations

import torch

from megatron_rl.config.schema import EngineSettings, ModelSettings
from megatron_rl.mcore.job import Job
from sglang_bridge.addresses import node_address
from sglang_bridge.settings import ServerPlace, server_device


def server_places(
    engine: EngineSettings, model: ModelSettings, job: Job, *, seed: int, return_routes: bool
) -> list[ServerPlace]:
    """One place for each managed engine of this node.

    With GPUs, each engine gets `engine.tp` devices, behind those of the node's ranks. Every engine
    of the run samples with its own seed, derived from `seed`.
    """
    device = server_device(engine, torch.cuda.device_count())
    places = []
    for index in range(engine.count):
        first_gpu = job.local_world_size + index * engine.tp
        gpus = tuple(range(first_gpu, first_gpu + engine.tp))
        place = ServerPlace(
            model_path=model.path,
            device=device,
            node=job.node,
            host=node_address(job.num_nodes),
            gpus=gpus if device == "cuda" else (),
            return_routes=return_routes,
            load_format="dummy" if model.init == "random" else None,
            seed=(seed + job.node * engine.count + index) % 2**32,
        )
        places.append(place)
    return places
