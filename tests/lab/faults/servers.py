"""External engines for runs, and proxies in front of them that lie or call back."""

from __future__ import annotations

import contextlib
import http.client
import re
import shutil
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import psutil

from sglang_bridge.keys import RunKeys, create_keys
from sglang_bridge.server.lifeline import Lifeline
from sglang_bridge.server.managed_engine import ManagedEngine
from sglang_bridge.settings import ServerPlace, ServerSettings
from tests.support.jobs import ROOT

MODELS = ROOT / "megatron_rl/models/assets"
MODEL = MODELS / "qwen3_moe_tiny_two_digit_addition"
_START_SECONDS = 300.0
_FORWARD_SECONDS = 120.0

ChangeReply = Callable[[bytes], bytes]
Observe = Callable[[str, bytes], None]


@dataclass(frozen=True)
class ServerKind:
    """The kind of a server. number: tells apart servers of one kind.

    model: the directory of a shipped model. rope_theta: the base of the rotary embedding, None as
    in the shipped model.
    """

    number: int = 0
    dtype: str = "float32"
    rope_theta: float | None = None
    model: Path = MODEL

    @property
    def name(self) -> str:
        """A name for files."""
        other_model = "" if self.model == MODEL else f"-{self.model.name}"
        if self.rope_theta is not None:
            other_model += f"-theta-{self.rope_theta:g}"
        return f"server-{self.dtype}-{self.number}{other_model}"


class ServerPark:
    """SGLang servers that outlive runs. Each is started when it is first needed.

    directory: for logs and keys.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._keys = create_keys()
        self._lifeline = Lifeline()
        self._servers: dict[ServerKind, ManagedEngine] = {}
        self._dead_kinds: set[ServerKind] = set()
        directory.mkdir(parents=True, exist_ok=True)
        self.key_file = directory / "keys.json"
        self.key_file.touch(0o600)
        self.key_file.write_bytes(msgspec.json.encode(self._keys))

    @property
    def keys(self) -> RunKeys:
        """The keys of all servers."""
        return self._keys

    def server(self, kind: ServerKind) -> ManagedEngine:
        """Return a healthy server. It may be in its first start, or in a later one."""
        if kind not in self._servers:
            place = ServerPlace(
                model_path=str(self._model(kind)),
                device="cpu",
                node=0,
                host="127.0.0.1",
                gpus=(),
                return_routes=True,
                load_format=None,
                seed=kind.number,
            )
            settings = msgspec.convert({"dtype": kind.dtype}, ServerSettings)
            log = self._directory / f"{kind.name}.log"
            self._servers[kind] = ManagedEngine.start(
                settings, place, keys=self._keys, log_path=log, lifeline=self._lifeline
            )
        server = self._servers[kind]
        if kind in self._dead_kinds:
            self._dead_kinds.remove(kind)
            server.restart()
        if not server.poll_healthy():
            server.wait_healthy(_START_SECONDS)
        return server

    def kill(self, kind: ServerKind) -> None:
        """Kill a server. It is started again when it is needed again."""
        server = self._servers[kind]
        self._dead_kinds.add(kind)
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(server.pid).children(recursive=True):
                process.kill()

    def drop(self, kind: ServerKind) -> None:
        """End a server that no further row needs."""
        self._servers.pop(kind).stop()

    def _model(self, kind: ServerKind) -> Path:
        """Return the model of a kind, which is written first if it is not the shipped one."""
        if kind.rope_theta is None:
            return kind.model
        model = self._directory / f"model-of-{kind.name}"
        shutil.copytree(kind.model, model, dirs_exist_ok=True)
        configuration = msgspec.json.decode((kind.model / "config.json").read_bytes())
        configuration["rope_theta"] = kind.rope_theta
        (model / "config.json").write_bytes(msgspec.json.encode(configuration))
        return model

    def close(self) -> None:
        """End all servers."""
        for server in self._servers.values():
            server.stop()
        self._lifeline.close()


class LyingProxy:
    """Forwards requests to a server, and lies while its attributes say so.

    change: gets the body of a reply to `/generate`, and returns the body to send. observe: gets
    path and body of each request before it is forwarded. key: replaces the key of every request.
    """

    def __init__(self, url: str) -> None:
        self.change: ChangeReply | None = None
        self.observe: Observe | None = None
        self.key: str | None = None
        self.target = urllib.parse.urlsplit(url).netloc
        self._server = _ProxyServer(self)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """The address of the proxy."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _ProxyServer(ThreadingHTTPServer):
    daemon_threads = True
    # A collector opens many connections at once when a step begins. Those beyond the default of 5
    # are dropped, and clients try again after 1, 3, 7, ... 127 seconds.
    request_queue_size = 512

    def __init__(self, proxy: LyingProxy) -> None:
        super().__init__(("127.0.0.1", 0), _ProxyHandler)
        self.proxy = proxy


class _ProxyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _ProxyServer

    def do_GET(self) -> None:
        self._forward()

    def do_POST(self) -> None:
        self._forward()

    def log_message(self, *arguments: object) -> None:
        """Write nothing."""

    def _forward(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if proxy.observe is not None:
            proxy.observe(self.path, body)
        key = self.headers.get("Authorization", "")
        if proxy.key is not None:
            key = f"Bearer {proxy.key}"
        headers = {"Content-Type": "application/json", "Authorization": key}
        try:
            status, reply = _exchange(proxy.target, self.command, self.path, body, headers)
        except (OSError, http.client.HTTPException):
            self.close_connection = True
            return
        if proxy.change is not None and self.path == "/generate":
            reply = proxy.change(reply)
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)


@contextlib.contextmanager
def open_proxy(url: str) -> Iterator[LyingProxy]:
    """Open a proxy in front of a server."""
    proxy = LyingProxy(url)
    try:
        yield proxy
    finally:
        proxy.close()


def answer_garbage(reply: bytes) -> bytes:
    """Replace a reply by half of it."""
    return reply[: len(reply) // 2]


def answer_nan(reply: bytes) -> bytes:
    """Replace every log-probability by null, as servers write NaN."""
    return re.sub(rb"\[-?\d+\.\d+(?:e-?\d+)?,", b"[null,", reply)


def answer_wrong_version(reply: bytes) -> bytes:
    """Replace the version of the weights by one that was never sent."""
    return re.sub(
        rb'"(weight_version|version)"(\s*:\s*)"\d+"',
        lambda match: b'"' + match[1] + b'"' + match[2] + b'"977"',
        reply,
    )


def _exchange(
    target: str, method: str, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(target, timeout=_FORWARD_SECONDS)
    try:
        connection.request(method, path, body or None, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
