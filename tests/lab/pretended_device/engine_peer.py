"""Script: answers on the pretended device to the calls with which a trainer sends weights.

Usage: python -m tests.lab.pretended_device tests.lab.pretended_device.engine_peer FILE. It writes
its port to FILE, serves until it is killed, and receives buckets over NCCL as SGLang does. Its
checksums are computed from the tensors that arrived. `POST /fail` makes every later update fail.
"""

from __future__ import annotations

import datetime
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)

from sglang_bridge.weights.buckets import Bucket
from sglang_bridge.weights.expectation import WeightExpectation

TIMEOUT = datetime.timedelta(seconds=30)
NUM_EXPERTS = 8


class Peer:
    """The state of the engine. last_update: the tensors of the last update."""

    def __init__(self) -> None:
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.last_update = self._empty()
        self.must_fail = False
        self.label = "default"

    def answer(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        if path == "/init_weights_update_group":
            self.join(request)
        elif path == "/begin_weight_update":
            self.last_update = self._empty()
        elif path == "/update_weights_from_distributed":
            if self.must_fail:
                return {"success": False, "message": "no room"}
            self.receive(request)
        elif path == "/weights_checker":
            return {"ranks": [{"checksums": self.last_update.checksums()}]}
        elif path == "/update_weight_version":
            self.label = request["new_version"]
        elif path == "/fail":
            self.must_fail = True
        return {"success": True}

    def join(self, request: dict[str, Any]) -> None:
        """As SGLang's `init_custom_process_group`."""
        url = f"tcp://{request['master_address']}:{request['master_port']}"
        rank = request["rank_offset"]
        size = request["world_size"]
        name = request["group_name"]
        store, _, _ = next(iter(rendezvous(url, rank, size, timeout=TIMEOUT)))
        group, _ = _new_process_group_helper(
            size,
            rank,
            [],
            Backend(request["backend"]),
            PrefixStore(name, store),
            group_name=name,
            timeout=TIMEOUT,
        )
        _world.pg_group_ranks[group] = {index: index for index in range(size)}
        self.groups[name] = group

    def receive(self, request: dict[str, Any]) -> None:
        bucket = Bucket(torch.empty(0))
        bucket.names = request["names"]
        bucket.dtypes = [getattr(torch, name) for name in request["dtypes"]]
        bucket.shapes = [torch.Size(shape) for shape in request["shapes"]]
        sizes = zip(bucket.shapes, bucket.dtypes, strict=True)
        num_bytes = sum(shape.numel() * dtype.itemsize for shape, dtype in sizes)
        bucket.flat = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        dist.broadcast(bucket.flat, src=0, group=self.groups[request["group_name"]])
        for name, tensor in bucket.tensors():
            self.last_update.add(name, tensor)

    def _empty(self) -> WeightExpectation:
        return WeightExpectation(dtype=torch.bfloat16, num_experts=NUM_EXPERTS, device="cuda")


def make_handler(peer: Peer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(peer.answer(self.path, json.loads(body)))

        def do_GET(self) -> None:
            info = {"device": "cuda", "moe_runner_backend": "triton"}
            self.reply(info | {"weight_version": peer.label})

        def reply(self, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None: ...

    return Handler


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(Peer()))
    file = Path(sys.argv[1])
    partial = file.with_suffix(".partial")
    partial.write_text(str(server.server_address[1]))
    partial.rename(file)
    server.serve_forever()


if __name__ == "__main__":
    main()
