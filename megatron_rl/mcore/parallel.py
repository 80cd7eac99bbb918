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

from megatron_rl.config.schema import ParallelSettings


@dataclass(frozen=True)
class RankLayout:
    """One rank's place. dp is the dense data-parallel group (experts are sharded across it); node counts hosts.

    control_group: gloo over all ranks, for commands and rollouts; tensors of the model use the device's backend.
    tp_group: the ranks that share the vocabulary, None when they do not.
    """

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
    device: torch.device
    control_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup | None


def initialize(parallel: ParallelSettings, *, seed: int) -> RankLayout:
    """Join the job torchrun started, or start one of a single process; set every seed."""
    timeout = datetime.timedelta(seconds=parallel.timeout_s)
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    _join(device, timeout)
    _make_groups(parallel)
    _seed_everything(seed)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return RankLayout(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world,
        node=rank // local_world,
        num_nodes=world_size // local_world,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        device=device,
        control_group=dist.new_group(backend="gloo", timeout=timeout),
        tp_group=parallel_state.get_tensor_model_parallel_group() if parallel.tp > 1 else None,
    )


def _join(device: torch.device, timeout: datetime.timedelta) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=None if "RANK" in os.environ else f"tcp://127.0.0.1:{_free_port()}",
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            timeout=timeout,
        )


def _make_groups(parallel: ParallelSettings) -> None:
    chunks = parallel.vpp or 1
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        distributed_timeout_minutes=math.ceil(parallel.timeout_s / 60),
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
