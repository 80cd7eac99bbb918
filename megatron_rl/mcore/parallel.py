"""Process groups: the world becomes Megatron's grid."""

from __future__ import annotations

import datetime
import math
import os
import random
import socket
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_rl.mcore.model import ParallelSizes


@dataclass(frozen=True)
class RankLayout:
    """One rank's place. dp is the dense data-parallel group (experts are sharded across it); node counts hosts."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    num_nodes: int
    dp_rank: int
    dp_size: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    ep_rank: int
    is_last_stage: bool
    device: torch.device
    control_group: dist.ProcessGroup


def initialize(sizes: ParallelSizes, *, seed: int, timeout_s: float) -> RankLayout:
    """Join the job torchrun started, or start one of a single process; set every seed."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    timeout = datetime.timedelta(seconds=timeout_s)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        init = None if "RANK" in os.environ else f"tcp://127.0.0.1:{_free_port()}"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=init,
            rank=int(os.environ.get("RANK", "0")),
            world_size=world_size,
            timeout=timeout,
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
    )
    _seed_everything(seed)
    return RankLayout(
        rank=dist.get_rank(),
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world,
        node=dist.get_rank() // local_world,
        num_nodes=world_size // local_world,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        is_last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        device=torch.device("cuda", local_rank) if on_gpu else torch.device("cpu"),
        control_group=dist.new_group(backend="gloo", timeout=timeout),
    )


def shutdown() -> None:
    """Leave the job; harmless when it was never joined."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
