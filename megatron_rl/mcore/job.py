"""Joins the ranks of a job before anything of Megatron is imported.

Engines are started right after joining and load while Megatron is imported.
"""

from __future__ import annotations

import datetime
import os
import socket
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _get_default_store

from megatron_rl.config.schema import ParallelSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.open_files import raise_open_file_limit


@dataclass(frozen=True)
class Job:
    """The place of this rank among all ranks.

    rank, world_size: this rank and the number of ranks.
    local_rank, local_world_size: the same within this host.
    node, num_nodes: the index of this host and the number of hosts.
    device: the CUDA device of this rank, or the CPU.
    control_group: a gloo group of all ranks, for commands and rollouts. Tensors of the model use
        the device's backend.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    num_nodes: int
    device: torch.device
    control_group: dist.ProcessGroup

    def store(self) -> dist.Store:
        """Return a new connection to the key-value store of all ranks, for one thread."""
        return _get_default_store().clone()  # type: ignore[attr-defined]


def join(parallel: ParallelSettings) -> Job:
    """Join the job that torchrun started, or start one of a single process. Collective.

    Raises `Failure`.
    """
    raise_open_file_limit()
    timeout = datetime.timedelta(seconds=parallel.timeout_s)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = _local_device(local_rank)
    if not dist.is_initialized():
        _share_gloo_device()
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=None if "RANK" in os.environ else f"tcp://127.0.0.1:{_free_port()}",
            store=_store_of_this_start(timeout),
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            timeout=timeout,
        )
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    return Job(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node=rank // local_world_size,
        num_nodes=world_size // local_world_size,
        device=device,
        control_group=dist.new_group(backend="gloo", timeout=timeout),
    )


def leave() -> None:
    """Leave the job. Does nothing if this process never joined one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _store_of_this_start(timeout: datetime.timedelta) -> dist.Store | None:
    """Return the part of torchrun's key-value store that only the ranks of this start use.

    torchrun keeps its store when it starts the ranks again. In it are the addresses of the earlier
    ranks, which the new ones would wait for. None: torch makes a store for each start, or there is
    no torchrun. Raises `Failure`.
    """
    environment = os.environ
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    is_single_node = environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"]
    if not is_single_node and environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        # The nodes count their restarts apart: no count names the same part on all of them
        raise Failure(
            "torchrun --max-restarts on several nodes would keep the keys of the earlier ranks. "
            "Before torchrun, on all nodes: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
            ExitCode.REFUSED,
        )
    store = dist.TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=False,
        timeout=timeout,
    )
    return dist.PrefixStore(f"start-{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _local_device(local_rank: int) -> torch.device:
    """Select this rank's CUDA device, if there is CUDA."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _share_gloo_device() -> None:
    """Make gloo groups created from now on use the device of the first of them.

    torch creates one device for each group, and each device has a thread that wakes up every
    10 ms: forty groups cost a waiting rank 5 % of a core. torch's `new_group` has no option for
    it.

    Nothing changes if TORCH_GLOO_LAZY_INIT is set, because lazy connections fail on a device that
    serves several groups. A second call changes nothing.
    """
    gloo: Any = distributed_c10d.ProcessGroupGloo
    original_init = gloo.__init__
    is_patched = isinstance(original_init, FunctionType)
    if is_patched or os.environ.get("TORCH_GLOO_LAZY_INIT"):
        return
    devices: list[Any] = []

    def __init__(self: Any, *place: Any, **options: Any) -> None:
        if options.keys() != {"timeout"}:
            original_init(self, *place, **options)
        elif not devices:  # torch knows which network interface to use
            original_init(self, *place, **options)
            devices.extend(self.options._devices)
        else:
            original_init(self, *place, _options_with(gloo, devices, options["timeout"]))

    # A subclass would not do: torch asks groups for their class, and they forget that Python
    # created them.
    gloo.__init__ = __init__


def _options_with(gloo: Any, devices: list[Any], timeout: Any) -> Any:
    options = gloo._Options()
    options._devices = devices
    options._timeout = timeout
    options._threads = 2 * len(devices)
    return options
