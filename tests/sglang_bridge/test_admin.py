"""The control client against a small HTTP server."""

import contextlib
import http.server
import itertools
import json
import socketserver
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_bridge.admin import CACHE_TAGS, WEIGHT_TAGS, AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import RequestFailed
from sglang_bridge.keys import RunKeys
from sglang_bridge.plugin.narrow_routes import STATE_KEY

ANSWERS: dict[str, tuple[int, bytes]] = {
    "/ready": (200, b""),
    "/pause_generation": (200, b'{"status": "ok", "message": "Generation paused successfully."}'),
    "/release_memory_occupation": (200, b"null"),
    "/resume_memory_occupation": (200, b"null"),
    "/flush_cache": (400, b"Flush cache failed.\n"),
    "/continue_generation": (200, b"Resumed.\n"),
    "/begin_weight_update": (400, b'{"success": false, "message": "a session is already open"}'),
    "/end_weight_update": (200, b'{"success": false, "message": "none was open"}'),
    "/server_info": (200, b'{"tp_size": 1}'),
    "/update_weights_from_disk": (200, b'{"success": true, "message": ""}'),
    "/weights_checker": (
        200,
        b'{"success": true, "message": "", "ranks": ['
        b'{"checksums": {"a": "2f"}, "per_gpu_checksum": "y", "parallelism_info": [{"tp_rank": 1}]}'
        b',{"checksums": {"a": "1f"}, "per_gpu_checksum": "x", "parallelism_info": [{"tp_rank": 0}]'
        b"}]}",
    ),
}

METRICS = b"""# HELP sglang:generation_tokens_total Number of generation tokens processed.
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{engine_type="unified",is_streaming="false"} 2476.0
sglang:generation_tokens_total{engine_type="unified",is_streaming="true"} 1e+06
sglang:generation_tokens_histogram_sum{engine_type="unified"} 7.0
sglang:prompt_tokens_total{engine_type="unified"} 9.0
"""


def client(url: str) -> AdminClient:
    return AdminClient(Engine(url=url), RunKeys("user", "boss"))


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = (self.path, self.headers.get("Authorization"), body)
        self.server.requests.append(request)  # type: ignore[attr-defined]
        status, answer = ANSWERS[self.path]
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as running:
        running.requests = []  # type: ignore[attr-defined]
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture
def admin(server: http.server.ThreadingHTTPServer) -> AdminClient:
    return client(f"http://127.0.0.1:{server.server_port}")


def test_control_requests_use_the_admin_key(
    admin: AdminClient, server: http.server.ThreadingHTTPServer
) -> None:
    admin.pause()
    assert admin.server_info() == {"tp_size": 1}
    (first, second) = server.requests  # type: ignore[attr-defined]
    assert (first[0], first[1], json.loads(first[2])) == (
        "/pause_generation",
        "Bearer boss",
        {"mode": "retract"},
    )
    assert second[:2] == ("/server_info", "Bearer user")


def test_an_engine_is_paused_before_it_sleeps_and_wakes_by_tags(
    admin: AdminClient, server: http.server.ThreadingHTTPServer
) -> None:
    """SGLang ends a server that shall give memory back while a request runs."""
    admin.sleep()
    admin.wake(WEIGHT_TAGS)
    admin.wake(CACHE_TAGS)
    requests = server.requests  # type: ignore[attr-defined]
    assert [(path, json.loads(body)) for path, _, body in requests] == [
        ("/pause_generation", {"mode": "retract"}),
        ("/release_memory_occupation", {"tags": ["weights", "kv_cache", "cuda_graph"]}),
        ("/resume_memory_occupation", {"tags": ["weights"]}),
        ("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}),
    ]


def test_is_ready_is_false_without_a_server(admin: AdminClient) -> None:
    assert admin.is_ready()
    assert not client("http://127.0.0.1:9").is_ready()


def test_text_answers_count_as_success(admin: AdminClient) -> None:
    admin.resume()


def test_disk_update_overrides_the_load_format(
    admin: AdminClient, server: http.server.ThreadingHTTPServer
) -> None:
    admin.update_weights_from_disk("/d", timeout=5)
    (path, _, body) = server.requests[0]  # type: ignore[attr-defined]
    assert path == "/update_weights_from_disk"
    assert json.loads(body) == {
        "model_path": "/d",
        "load_format": "auto",
        "flush_cache": False,
    }


def test_a_version_is_set_without_aborting_requests(
    admin: AdminClient,
    server: http.server.ThreadingHTTPServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ANSWERS, "/update_weight_version", (200, b'{"success": true}'))
    admin.set_weight_version("3")
    (path, _, body) = server.requests[0]  # type: ignore[attr-defined]
    assert path == "/update_weight_version"
    assert json.loads(body) == {"new_version": "3", "abort_all_requests": False}
    monkeypatch.setitem(ANSWERS, "/model_info", (200, b'{"weight_version": "3"}'))
    assert admin.weight_version() == "3"


def test_checksums_come_in_the_order_of_the_ranks(admin: AdminClient) -> None:
    assert admin.checksums() == [{"a": "1f"}, {"a": "2f"}]


def test_generated_tokens_are_the_sum_of_the_engine_counter(
    admin: AdminClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ANSWERS, "/metrics", (200, METRICS))
    assert admin.generated_tokens() == 1_002_476


def test_an_engine_without_metrics_has_no_number_of_tokens(
    admin: AdminClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ANSWERS, "/metrics", (404, b"Not Found"))
    assert admin.generated_tokens() is None


@pytest.mark.parametrize("metrics", [b"", METRICS[:160]])
def test_an_engine_without_an_ended_request_has_generated_no_tokens(
    metrics: bytes, admin: AdminClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ANSWERS, "/metrics", (200, metrics))
    assert admin.generated_tokens() == 0


@pytest.mark.parametrize("number", [b"NaN", b"-1.0", b"+Inf", b"many"])
def test_an_invalid_counter_is_a_failed_request(
    number: bytes, admin: AdminClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = b'sglang:generation_tokens_total{a="b"} ' + number + b"\n"
    monkeypatch.setitem(ANSWERS, "/metrics", (200, answer))
    with pytest.raises(RequestFailed, match="generation_tokens_total"):
        admin.generated_tokens()


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("flush_cache", "answered 400: Flush cache failed"),
        ("begin_weight_update", "already open"),
        ("end_weight_update", "failed: none was open"),
    ],
)
def test_failures_contain_the_engine_message(admin: AdminClient, method: str, words: str) -> None:
    with pytest.raises(RequestFailed, match=words):
        getattr(admin, method)()


@pytest.mark.parametrize(
    "garbage",
    [b"", b"<html>busy</html>", b"[]", b"null", b'{"tp_size": 1', b'{"a": "\xff"}', b"\xff\xfe"],
)
@pytest.mark.parametrize(
    ("path", "method"), [("/server_info", "server_info"), ("/model_info", "weight_version")]
)
def test_a_reply_that_is_no_object_is_a_failed_request(
    path: str,
    method: str,
    garbage: bytes,
    admin: AdminClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ANSWERS, path, (200, garbage))
    with pytest.raises(RequestFailed, match=f"{path} is no JSON object"):
        getattr(admin, method)()


@pytest.mark.parametrize(
    ("states", "narrows"),
    [
        ([{STATE_KEY: True}], True),
        ([{STATE_KEY: True}, {STATE_KEY: True}], True),
        ([{STATE_KEY: True}, {}], False),  # one replica did not load the plugin
        ([{STATE_KEY: "yes"}], False),
        ([{}], False),
        ([], False),
        (["text"], False),
        ({STATE_KEY: True}, False),
        (None, False),
    ],
)
def test_every_replica_must_say_that_it_narrows_routes(
    states: object, narrows: bool, admin: AdminClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = json.dumps({"internal_states": states}).encode()
    monkeypatch.setitem(ANSWERS, "/server_info", (200, info))
    assert admin.narrows_routes() is narrows


def test_a_reply_of_many_brackets_is_a_failed_request(
    admin: AdminClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ANSWERS, "/server_info", (200, b'{"a":' + b"[" * 100_000))
    with pytest.raises(RequestFailed, match="no JSON object"):
        admin.server_info()
    monkeypatch.setitem(ANSWERS, "/weights_checker", (200, b'{"a":' + b"[" * 100_000))
    with pytest.raises(RequestFailed, match="no checksums"):
        admin.checksums()


def test_missing_answer_names_the_url() -> None:
    with pytest.raises(RequestFailed, match=r"127\.0\.0\.1:9/pause_generation: no answer"):
        client("http://127.0.0.1:9").pause()


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "https://host", "http://"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        client(url)


class _RawServer(socketserver.ThreadingTCPServer):
    """Answers every request with the given pieces of bytes. seconds: before each piece."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, pieces: Iterator[bytes], seconds: float = 0.0) -> None:
        self.pieces = pieces
        self.seconds = seconds
        self.num_sent = 0
        super().__init__(("127.0.0.1", 0), _RawHandler)


class _RawHandler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        server: Any = self.server
        self.request.recv(65536)
        with contextlib.suppress(OSError):
            for piece in server.pieces:
                time.sleep(server.seconds)
                self.request.sendall(piece)
                server.num_sent += len(piece)


def raw_failure(
    pieces: Iterator[bytes], seconds: float = 0.0, timeout: float = 1.0
) -> tuple[str, int, float]:
    """Return why a request for the settings fails, the bytes that were sent, and the seconds."""
    with _RawServer(pieces, seconds) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        admin = AdminClient(Engine(url=address), RunKeys("user", "boss"), timeout=timeout)
        start = time.monotonic()
        with pytest.raises(RequestFailed) as info:
            admin.server_info()
        server.shutdown()
    return str(info.value), server.num_sent, time.monotonic() - start


def test_an_endless_reply_is_read_to_a_limit() -> None:
    flood = itertools.chain([b"HTTP/1.1 200 OK\r\n\r\n"], itertools.repeat(b" " * 65536, 4000))
    reason, num_sent, _ = raw_failure(flood, timeout=30.0)
    assert "more than 67108864 bytes" in reason
    assert num_sent < 80 * 2**20  # the sockets' buffers hold some


def test_a_reply_that_comes_byte_by_byte_ends_at_the_timeout() -> None:
    drip = itertools.chain([b"HTTP/1.1 200 OK\r\n\r\n"], itertools.repeat(b" ", 100))
    reason, _, seconds = raw_failure(drip, 0.1)
    assert "not complete in time" in reason
    assert seconds < 5


@pytest.mark.parametrize(
    "start",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\n",
    ],
)
def test_a_reply_that_breaks_off_is_a_failed_request(start: bytes) -> None:
    reason, _, _ = raw_failure(iter([start, b'{"a": 1}']))
    assert "IncompleteRead" in reason
