"""A process group between the trainer's source rank and an engine's ranks.

It is independent of the trainer's own groups.
"""

from __future__ import annotations

import datetime
import socket

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# Gloo waits so many times for a peer that does not connect, each time for the group's timeout.
_GLOO_WAITS = 5


def open_store(address: str, *, timeout_seconds: float) -> dist.TCPStore:
    """Open a rendezvous at `address` and a free port (`.port`). It lives as long as the object."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        # By itself, torch would listen on every interface. It takes over this socket instead.
        return dist.TCPStore(
            address,
            listener.getsockname()[1],
            is_master=True,
            timeout=datetime.timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def join_as_source(
    store: dist.Store, *, name: str, world_size: int, backend: str, timeout_seconds: float
) -> dist.ProcessGroup:
    """Join as rank 0 the group that SGLang's `init_custom_process_group` builds on its side.

    timeout_seconds: of each transfer. Joining a group of gloo takes at most half of it, because all
    peers have arrived, and other groups wait for this one. With TORCH_DISTRIBUTED_DEBUG=DETAIL,
    torch wraps the group, and its timeout cannot change later.
    """
    join_seconds = timeout_seconds
    is_wrapped = dist.get_debug_level() == dist.DebugLevel.DETAIL
    if backend == dist.Backend.GLOO and not is_wrapped:
        join_seconds /= 2 * _GLOO_WAITS
    group = make_group(
        store, name=name, world_size=world_size, backend=backend, timeout_seconds=join_seconds
    )
    if join_seconds != timeout_seconds:
        set_timeout(group, timeout_seconds)
    return group


def make_group(
    store: dist.Store, *, name: str, world_size: int, backend: str, timeout_seconds: float
) -> dist.ProcessGroup:
    """Make rank 0 of a group beside torch's default group.

    Both sides must use the same store prefix, and build the backend through torch's own helper,
    which has no public name.
    """
    group, _ = c10d._new_process_group_helper(
        world_size,
        0,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Change the timeout of a group's further transfers. torch's function has no public name."""
    c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)


def leave(group: dist.ProcessGroup) -> None:
    """Destroy this process's side of a group."""
    dist.destroy_process_group(group)


def abort(group: dist.ProcessGroup) -> None:
    """Destroy this process's side of a group after a failure.

    NCCL's watchdog ends the process when a transfer that is still pending reaches the group's
    timeout, so pending transfers are aborted. Other backends end them at the timeout, and this
    function waits for it.
    """
    if dist.get_backend(group) == dist.Backend.NCCL:
        abort_transfers(group)
    else:
        leave(group)


def abort_transfers(group: dist.ProcessGroup) -> None:
    """Destroy a group of NCCL with its pending transfers. torch's function has no public name."""
    c10d._abort_process_group(group)
