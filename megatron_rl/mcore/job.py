"""Joining the ranks of a job before anything of Megatron is imported: engines are started first and
load meanwhile.
"""

from __future__ import annotations

import datetime
import os
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.config.schema import ParallelSettings
from megatron_rl.mcore.gloo_device import share_gloo_device


@dataclass(frozen=True)
class Job:
    """One rank's place among all ranks. node counts hosts.

    control_group: gloo over all ranks, for commands and rollouts; tensors of the model use the
    device's backend.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    num_nodes: int
    device: torch.device
    control_group: dist.ProcessGroup


def join(parallel: ParallelSettings) -> Job:
    """Join the job torchrun started, or start one of a single process."""
    timeout = datetime.timedelta(seconds=parallel.timeout_s)
    local_rank, local_world = (
        int(os.environ.get("LOCAL_RANK", "0")),
        int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        share_gloo_device()
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=None if "RANK" in os.environ else f"tcp://127.0.0.1:{_free_port()}",
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            timeout=timeout,
        )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return Job(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world,
        node=rank // local_world,
        num_nodes=world_size // local_world,
        device=device,
        control_group=dist.new_group(backend="gloo", timeout=timeout),
    )


def leave() -> None:
    """Leave the job; harmless when it was never joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
