"""Program: stands in for an engine that shares the trainer's device, in a process of its own.

It answers the requests of a weight update, sleeps and wakes as SGLang does, and fetches weights by
checkpoint-engine's protocol. Usage: receiver.py FILE DTYPE EXPERTS. It writes its port to FILE.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import zmq

from sglang_bridge.weights.expectation import WeightExpectation
from sglang_bridge.weights.ipc.transport import device_name

HOST_NAME = "host"  # the device without CUDA
_CACHE_BYTES = 1 << 28


def share_on_host(tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """Make a handle of host memory with as many values as one of CUDA, the seventh its device.

    The memory moves into a segment that other processes can map.
    """
    manager, name, size = tensor.untyped_storage()._share_filename_cpu_()
    return open_on_host, (manager, name, size, None, None, None, 0)


def open_on_host(manager: bytes, name: bytes, size: int, *_: Any) -> torch.Tensor:
    """Map the memory of a handle, uint8 [size]."""
    storage = torch.UntypedStorage._new_shared_filename_cpu(manager, name, size)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def package() -> str:
    """The module that fetches weights: checkpoint-engine's if it can be used here."""
    has_package = importlib.util.find_spec("checkpoint_engine") is not None
    if has_package and torch.cuda.is_available():
        return "checkpoint_engine.worker"
    return "tests.support.ipc_protocol"


class Receiver:
    """The state of the engine: what it holds on the device while it is awake."""

    def __init__(self, dtype: torch.dtype, num_experts: int) -> None:
        self._dtype = dtype
        self._num_experts = num_experts
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._protocol = importlib.import_module(package())
        self._weights: dict[str, torch.Tensor] = {}
        self._cache: torch.Tensor | None = None
        self._awake_tags: set[str] = set()
        self._label = "default"

    def answer(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one request. Raises ValueError for one that SGLang would refuse.

        The trainer labels the weights while they arrive. It sends no other requests at once.
        """
        if path == "/release_memory_occupation":
            self._sleep(set(request["tags"]))
        elif path == "/resume_memory_occupation":
            self._wake(set(request["tags"]))
        elif path == "/update_weights_from_ipc":
            self._fetch(request["zmq_handles"])
        elif path == "/weights_checker":
            return {"success": True, "ranks": [{"checksums": self._checksums()}]}
        elif path == "/update_weight_version":
            self._label = request["new_version"]
        elif path == "/end_weight_update":
            raise ValueError("no session is open")
        return {"success": True}

    def describe(self) -> dict[str, Any]:
        """The engine's settings and its label."""
        info = {"device": self._device, "moe_runner_backend": "triton"}
        return info | {"weight_version": self._label}

    def _sleep(self, tags: set[str]) -> None:
        self._awake_tags -= tags
        if "weights" in tags:
            self._weights = {}
        if "kv_cache" in tags:
            self._cache = None
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def _wake(self, tags: set[str]) -> None:
        self._awake_tags |= tags
        if "kv_cache" in tags:
            self._cache = torch.zeros(_CACHE_BYTES, dtype=torch.uint8, device=self._device)

    def _fetch(self, addresses: dict[str, str]) -> None:
        if self._awake_tags != {"weights"}:
            raise ValueError(f"weights arrive while {sorted(self._awake_tags)} are awake")
        on_gpu = self._device == "cuda"
        name = device_name(torch.device("cuda", 0)) if on_gpu else HOST_NAME
        if addresses.keys() != {name}:
            raise ValueError(f"sockets for {sorted(addresses)}, and this is {name}")
        self._weights = {}

        def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
            self._weights.update((name, tensor.clone()) for name, tensor in tensors)

        context = zmq.Context()
        try:
            self._protocol.update_weights_from_ipc(context, addresses[name], 0, run=load)
        finally:
            context.destroy(linger=1000)

    def _checksums(self) -> dict[str, str]:
        device: Any = self._device
        expectation = WeightExpectation(
            dtype=self._dtype, num_experts=self._num_experts, device=device
        )
        for name, tensor in self._weights.items():
            expectation.add(name, tensor)
        return expectation.checksums()


def make_handler(receiver: Receiver) -> type[BaseHTTPRequestHandler]:
    """Make the handler of a server for one receiver."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            try:
                self._reply(200, receiver.answer(self.path, json.loads(body)))
            except Exception as error:  # the trainer reports it
                self._reply(400, {"success": False, "message": f"{type(error).__name__}: {error}"})

        def do_GET(self) -> None:
            self._reply(200, receiver.describe())

        def _reply(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None: ...

    return Handler


def main(file: Path, dtype: str, num_experts: str) -> None:
    """Serve until this process is killed."""
    receiver = Receiver(getattr(torch, dtype), int(num_experts))
    server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(receiver))
    partial_file = file.with_suffix(".partial")
    partial_file.write_text(str(server.server_address[1]))
    os.replace(partial_file, file)
    server.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
