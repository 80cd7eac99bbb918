"""The engine's side of a weight group, in its own process and with the calls that SGLang makes."""

from __future__ import annotations

import datetime
import threading
from multiprocessing.connection import Connection
from typing import Any

from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import RequestFailed
from sglang_bridge.keys import create_keys


class PeerAdmin(AdminClient):
    """Forwards the two calls that matter to the peer process and waits for its answers."""

    def __init__(self, url: str, pipe: Connection | None) -> None:
        super().__init__(Engine(url=url), create_keys())
        self._pipe = pipe
        self._lock = threading.Lock()
        self.buckets: list[list[float]] = []
        self.refuse = False
        self.is_up = True
        self.join: dict[str, Any] = {}

    def weight_version(self) -> str:
        if not self.is_up:
            raise RequestFailed("it does not answer")
        return "default"

    def init_weights_update_group(self, **request: Any) -> None:
        self.join = request
        self._call(("init", request))

    def update_weights_from_distributed(self, **request: Any) -> None:
        if self.refuse:
            raise RequestFailed("no session is open")
        self.buckets.append(self._call(("update", request)))

    def destroy_weights_update_group(self, name: str) -> None:
        pass

    def _call(self, request_tuple: tuple[str, dict[str, Any]]) -> Any:
        assert self._pipe is not None
        with self._lock:
            try:
                self._pipe.send(request_tuple)
                return self._pipe.recv()
            except (EOFError, OSError) as error:
                raise RequestFailed("the peer is gone") from error


def serve_peer(pipe: Connection) -> None:
    """Join the group and receive buckets, as SGLang does.

    See its `init_custom_process_group` and its weight updater.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import (
        Backend,
        PrefixStore,
        _new_process_group_helper,
        _world,
        rendezvous,
    )

    pipe.send("imported")
    _, request = pipe.recv()
    url = f"tcp://{request['address']}:{request['port']}"
    rank = request["rank_offset"]
    size = request["world_size"]
    name = request["name"]
    store, _, _ = next(iter(rendezvous(url, rank, size, timeout=datetime.timedelta(seconds=20))))
    group, _ = _new_process_group_helper(
        size,
        rank,
        [],
        Backend(request["backend"]),
        PrefixStore(name, store),
        group_name=name,
        timeout=datetime.timedelta(seconds=20),
    )
    _world.pg_group_ranks[group] = {index: index for index in range(size)}
    pipe.send(None)
    while True:
        _, request = pipe.recv()
        (shape,) = request["shapes"]
        (dtype,) = request["dtypes"]
        element = getattr(torch, dtype)
        flat = torch.empty(shape[0] * element.itemsize, dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=group)
        pipe.send(flat.view(element)[:16].tolist())
