"""An engine for weight updates: SGLang's calls and its process groups, and no model.

As a script: `python -m tests.support.weight_receiver FILE [SECONDS_PER_MB]`. It writes its port to
FILE, and serves until it is killed. It refuses what SGLang refuses: a second session, a bucket
without a session. `serving` in `GET /state` lists what would be served after each resume: a version
and the checksums of all tensors.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from sglang_bridge.engine import Engine


class Receiver:
    """The state of the engine. seconds_per_mb: how long it takes to receive."""

    def __init__(self, seconds_per_mb: float) -> None:
        self._seconds_per_mb = seconds_per_mb
        self._groups: dict[str, Any] = {}
        self._lock = threading.Lock()  # SGLang executes one request at a time
        self._weights: dict[str, str] = {}
        self._is_open = False
        self._label = "default"
        self._serving: list[dict[str, Any]] = []
        self._paths = Counter[str]()
        self._bytes = Counter[str]()
        self._updates: list[list[str]] = []
        self._delays: dict[str, float] = {}

    def state(self) -> dict[str, Any]:
        """Return the state, for tests."""
        return {
            "weight_version": self._label,
            "paths": dict(self._paths),
            "bytes": dict(self._bytes),
            "updates": self._updates,
            "serving": self._serving,
            "weights": self._weights,
            "is_open": self._is_open,
            "device": "cpu",
        }

    def answer(self, path: str, request: dict[str, Any]) -> str:
        """Execute a request; returns the reason if it fails."""
        self._paths[path] += 1
        if path == "/delay":
            self._delays |= request
            return ""
        time.sleep(self._delays.get(path, 0.0))
        with self._lock:
            return self._execute(path, request)

    def _execute(self, path: str, request: dict[str, Any]) -> str:
        if path == "/init_weights_update_group":
            self._join(request)
        elif path == "/begin_weight_update":
            if self._is_open:
                return "a weight-update session is already open"
            self._is_open = True
        elif path == "/end_weight_update":
            if not self._is_open:
                return "no weight-update session is open"
            self._is_open = False
        elif path == "/update_weights_from_distributed":
            if not self._is_open:
                return "update_weights_from_distributed must run between begin and end"
            return self._receive(request)
        elif path == "/update_weight_version":
            self._label = request["new_version"]
        elif path == "/continue_generation":
            self._serving.append({"version": self._label, "weights": dict(self._weights)})
        return ""

    def _join(self, request: dict[str, Any]) -> None:
        """As SGLang's `init_custom_process_group`, whose timeout is 30 minutes."""
        from torch.distributed.distributed_c10d import (
            Backend,
            PrefixStore,
            _new_process_group_helper,
            _world,
            rendezvous,
        )

        timeout = datetime.timedelta(minutes=30)
        url = f"tcp://{request['master_address']}:{request['master_port']}"
        rank = request["rank_offset"]
        size = request["world_size"]
        name = request["group_name"]
        store, _, _ = next(iter(rendezvous(url, rank, size, timeout=timeout)))
        group, _ = _new_process_group_helper(
            size,
            rank,
            [],
            Backend(request["backend"]),
            PrefixStore(name, store),
            group_name=name,
            timeout=timeout,
        )
        _world.pg_group_ranks[group] = {index: index for index in range(size)}
        self._groups[name] = group

    def _receive(self, request: dict[str, Any]) -> str:
        import torch
        import torch.distributed as dist

        from sglang_bridge.weights.buckets import Bucket

        bucket = Bucket(torch.empty(0), request["names"])
        bucket.dtypes = [getattr(torch, name) for name in request["dtypes"]]
        bucket.shapes = [torch.Size(shape) for shape in request["shapes"]]
        sizes = zip(bucket.shapes, bucket.dtypes, strict=True)
        num_bytes = sum(shape.numel() * dtype.itemsize for shape, dtype in sizes)
        bucket.flat = torch.empty(num_bytes, dtype=torch.uint8)
        time.sleep(self._seconds_per_mb * num_bytes / 2**20)
        try:
            dist.broadcast(bucket.flat, src=0, group=self._groups[request["group_name"]])
        except RuntimeError as error:
            return f"Failed to receive weights: {error}"
        self._bytes[request["group_name"]] += num_bytes
        self._updates.append(request["names"])
        for name, tensor in bucket.tensors():
            data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            self._weights[name] = f"{tensor.dtype} {hashlib.sha256(data).hexdigest()[:16]}"
        return ""


def make_handler(receiver: Receiver) -> type[BaseHTTPRequestHandler]:
    """The HTTP side of a receiver."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            reason = receiver.answer(self.path, json.loads(body))
            self.reply({"success": not reason, "message": reason})

        def do_GET(self) -> None:
            self.reply(receiver.state())

        def reply(self, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None: ...

    return Handler


class ReceiverProcess:
    """A receiver in a process of its own."""

    def __init__(self, folder: Path, *, seconds_per_mb: float = 0.0) -> None:
        file = folder / "port"
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests.support.weight_receiver", str(file)]
        self.process = subprocess.Popen([*command, str(seconds_per_mb)])
        deadline = time.monotonic() + 60
        while not file.exists():
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.05)
        self.url = f"http://127.0.0.1:{file.read_text()}"
        self.engine = Engine(url=self.url)

    def state(self) -> dict[str, Any]:
        """See `Receiver.state`."""
        with urllib.request.urlopen(f"{self.url}/state", timeout=30) as response:
            return dict(json.load(response))

    def delay(self, path: str, seconds: float) -> None:
        """Let requests for a path take longer from now on."""
        data = json.dumps({path: seconds}).encode()
        urllib.request.urlopen(f"{self.url}/delay", data=data, timeout=30).close()

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def open_receivers(
    folder: Path, count: int, *, seconds_per_mb: float = 0.0
) -> Iterator[list[ReceiverProcess]]:
    """Start receivers, which end with the context."""
    with contextlib.ExitStack() as stack:
        receivers = []
        for index in range(count):
            receiver = ReceiverProcess(folder / str(index), seconds_per_mb=seconds_per_mb)
            stack.callback(receiver.stop)
            receivers.append(receiver)
        yield receivers


def main() -> None:
    """Serve until the process is killed."""
    import torch

    torch.set_num_threads(1)
    receiver = Receiver(float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
    host = os.environ.get("WEIGHT_RECEIVER_HOST", "127.0.0.1")
    server = ThreadingHTTPServer((host, 0), make_handler(receiver))
    file = Path(sys.argv[1])
    part = file.with_suffix(".part")
    part.write_text(str(server.server_address[1]))
    part.rename(file)
    server.serve_forever()


if __name__ == "__main__":
    main()
