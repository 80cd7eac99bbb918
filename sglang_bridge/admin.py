"""Control requests to one engine: readiness, pausing, weights, checksums.

Each call blocks until the engine answers.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from sglang_bridge.engine import Engine
from sglang_bridge.errors import RequestFailed
from sglang_bridge.keys import RunKeys
from sglang_bridge.plugin import narrow_routes

# "retract" returns running requests to the queue, and they are recomputed under the new weights.
# "abort" would lose them. "in_place" would keep the cache that the old weights computed, and the
# engine refuses to flush it while requests run.
_PAUSE_MODE = "retract"
# Parts of an engine's memory, by SGLang's names, in the order in which they wake. New weights
# arrive between the two: the old ones are gone. Nothing may be cached or sampled before.
WEIGHT_TAGS = ("weights",)
CACHE_TAGS = ("kv_cache", "cuda_graph")
# Far more than the checksums of any model on all ranks of an engine, the largest reply
_MAX_REPLY_BYTES = 64 * 2**20
_PIECE_BYTES = 2**16
# One line for each set of labels, in Prometheus' text format.
_GENERATED_TOKENS = re.compile(rb"^sglang:generation_tokens_total(?:\{.*\})? (\S+)", re.MULTILINE)


class _Place(msgspec.Struct):
    tp_rank: int = 0


class _Rank(msgspec.Struct):
    checksums: dict[str, str]
    parallelism_info: list[_Place] = []  # of the target model alone


class _Outcome(msgspec.Struct):
    success: bool = True
    message: str = ""
    ranks: list[_Rank] | None = None


class AdminClient:
    """Controls one engine.

    keys: a server that was started without keys ignores them. timeout: seconds per call.

    Raises `ValueError` for a URL that is not http://HOST:PORT. Calls raise `RequestFailed`.
    """

    def __init__(self, engine: Engine, keys: RunKeys, *, timeout: float = 60.0) -> None:
        parts = urllib.parse.urlsplit(engine.url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"engine URL {engine.url!r}: expected http://HOST:PORT")
        self.engine = engine
        self._host = parts.hostname
        self._port = parts.port or 80
        self._keys = keys
        self._timeout = timeout

    @property
    def url(self) -> str:
        """The engine's URL. Failures name the engine by it."""
        return self.engine.url

    @property
    def address(self) -> tuple[str, int]:
        """The engine's host and port."""
        return self._host, self._port

    def is_ready(self, *, timeout: float = 2.0) -> bool:
        """True if the server accepts requests now; False also while nothing listens yet."""
        try:
            status, _ = self._exchange("GET", "/ready", None, timeout=timeout)
        except RequestFailed:
            return False
        return status == 200

    def server_info(self) -> dict[str, Any]:
        """The server's resolved settings and live state."""
        return self._get_json("/server_info")

    def narrows_routes(self) -> bool:
        """True if the server sends experts of routes as one or two bytes."""
        states = self.server_info().get("internal_states")  # one for each replica
        if not isinstance(states, list) or not states:
            return False
        return all(
            isinstance(state, dict) and state.get(narrow_routes.STATE_KEY) is True
            for state in states
        )

    def generated_tokens(self) -> int | None:
        """The tokens of all requests that have ended since the server's start.

        0 before the first request has ended: the counter appears with it. None where the server
        does not count, because it runs without --enable-metrics.
        """
        status, body = self._exchange("GET", "/metrics", None, admin=False)
        if status == HTTPStatus.NOT_FOUND:
            return None
        self._require_ok("/metrics", status, body)
        counts = [_count(match[1]) for match in _GENERATED_TOKENS.finditer(body)]
        if any(count is None for count in counts):
            raise RequestFailed(
                f"{self.url}/metrics: sglang:generation_tokens_total is no count of tokens"
            )
        return sum(filter(None, counts))

    def pause(self) -> None:
        """Stop generating. Running requests are recomputed once the engine resumes."""
        self._post("/pause_generation", {"mode": _PAUSE_MODE})

    def resume(self) -> None:
        """Continue generating."""
        self._post("/continue_generation", {})

    def sleep(self) -> None:
        """Pause, and give the device's memory back. The weights are lost.

        The requests that run are recomputed after the engine has woken up and resumed. A server on
        a CPU does everything but giving memory back. A server that is asleep already may end.
        """
        # Without it, SGLang 0.5.23 ends the server if a request runs
        self.pause()
        self._post("/release_memory_occupation", {"tags": [*WEIGHT_TAGS, *CACHE_TAGS]})

    def wake(self, tags: Sequence[str]) -> None:
        """Take memory for these parts again. Its contents are undefined."""
        self._post("/resume_memory_occupation", {"tags": list(tags)})

    def flush_cache(self) -> None:
        """Drop every cached prefix. Fails while requests run."""
        self._post("/flush_cache", {})

    def init_weights_update_group(
        self,
        *,
        address: str,
        port: int,
        rank_offset: int,
        world_size: int,
        name: str,
        backend: str,
        timeout: float,
    ) -> None:
        """Let the engine join a process group as ranks `rank_offset + tp_rank`, and wait for it."""
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        self._post("/init_weights_update_group", body, timeout=timeout)

    def destroy_weights_update_group(self, name: str) -> None:
        """Let the engine leave a process group."""
        self._post("/destroy_weights_update_group", {"group_name": name})

    def abort(self, name: str) -> None:
        """End the request of this name. The engine answers it with the tokens sampled so far."""
        self._post("/abort_request", {"rid": name})

    def abort_all(self) -> None:
        """End every request. The engine answers each with the tokens sampled so far."""
        self._post("/abort_request", {"abort_all": True})

    def begin_weight_update(self) -> None:
        """Open a weight-update session."""
        self._post("/begin_weight_update", {})

    def end_weight_update(self) -> None:
        """Close the session and postprocess the weights (fusing, quantization)."""
        self._post("/end_weight_update", {})

    def update_weights_from_distributed(
        self,
        *,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        timeout: float,
    ) -> None:
        """Let the engine receive one flattened bucket by broadcast, and wait until it is loaded."""
        body = {
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "group_name": group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        self._post("/update_weights_from_distributed", body, timeout=timeout)

    def update_weights_from_ipc(self, addresses: Mapping[str, str], *, timeout: float) -> None:
        """Let each rank of the engine fetch weights at an address, and wait until it has them.

        addresses: of ZeroMQ sockets, by the names of devices. The engine unpickles what it gets
        there. It needs the package checkpoint-engine.
        """
        body = {"zmq_handles": dict(addresses), "flush_cache": False}
        self._post("/update_weights_from_ipc", body, timeout=timeout)

    def set_weight_version(self, version: str) -> None:
        """Give the weights that the engine holds a version. Responses carry it from now on."""
        body = {"new_version": version, "abort_all_requests": False}
        self._post("/update_weight_version", body)

    def weight_version(self) -> str:
        """The version that the engine gives its weights."""
        return str(self._get_json("/model_info").get("weight_version"))

    def update_weights_from_disk(self, model_path: str, *, timeout: float) -> None:
        """Let the engine load a directory in Hugging Face format."""
        body = {
            "model_path": model_path,
            # Without it, the engine would use the format it was started with, such as "dummy".
            "load_format": "auto",
            "flush_cache": False,
        }
        self._post("/update_weights_from_disk", body, timeout=timeout)

    def checksums(self, *, timeout: float = 300.0) -> list[dict[str, str]]:
        """The weights of each tensor-parallel rank in order, as checksums by parameter name.

        A checksum has 64 bits and is written in hexadecimal.
        """
        outcome = self._post(
            "/weights_checker", {"action": "checksum", "selector": "target"}, timeout=timeout
        )
        if not outcome.ranks:
            raise RequestFailed(
                f"{self.url}/weights_checker returned no checksums: {outcome.message}"
            )
        ranks = sorted(outcome.ranks, key=lambda rank: [p.tp_rank for p in rank.parallelism_info])
        return [rank.checksums for rank in ranks]

    def _get_json(self, path: str) -> dict[str, Any]:
        status, body = self._exchange("GET", path, None, admin=False)
        self._require_ok(path, status, body)
        try:
            return msgspec.json.decode(body, type=dict[str, Any])
        except (ValueError, RecursionError) as error:  # a proxy's page, or a server that ends
            raise RequestFailed(
                f"{self.url}{path} is no JSON object ({error}): {body[:200]!r}"
            ) from error

    def _post(self, path: str, body: dict[str, Any], *, timeout: float | None = None) -> _Outcome:
        status, reply = self._exchange("POST", path, body, timeout=timeout)
        self._require_ok(path, status, reply)
        try:
            outcome = msgspec.json.decode(reply, type=_Outcome)
        except (ValueError, RecursionError):  # plain text, as /flush_cache answers
            return _Outcome(message=reply.decode(errors="replace"))
        if not outcome.success:
            raise RequestFailed(f"{self.url}{path} failed: {outcome.message}", status=status)
        return outcome

    def _require_ok(self, path: str, status: int, reply: bytes) -> None:
        if status != 200:
            words = reply[:2000].decode(errors="replace")
            raise RequestFailed(f"{self.url}{path} answered {status}: {words}", status=status)

    def _exchange(
        self, method: str, path: str, body: Any, *, timeout: float | None = None, admin: bool = True
    ) -> tuple[int, bytes]:
        key = self._keys.admin_api_key if admin else self._keys.api_key
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        seconds = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        connection = http.client.HTTPConnection(self._host, self._port, timeout=seconds)
        try:
            connection.request(
                method, path, None if body is None else msgspec.json.encode(body), headers
            )
            response = connection.getresponse()
            return response.status, _read_body(response, deadline)
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailed(
                f"{self.url}{path}: no answer ({type(error).__name__}: {error})"
            ) from error
        finally:
            connection.close()


def _read_body(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """Read a reply of limited size.

    deadline: by `time.monotonic`. A reply that comes byte by byte exceeds no timeout of a socket.
    """
    body = bytearray()
    while piece := response.read1(_PIECE_BYTES):
        body += piece
        if len(body) > _MAX_REPLY_BYTES:
            raise http.client.HTTPException(f"more than {_MAX_REPLY_BYTES} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError("it was not complete in time")
    if response.length:
        raise http.client.IncompleteRead(bytes(body), response.length)
    return bytes(body)


def _count(text: bytes) -> int | None:
    """Read a counter; None for a text that is none."""
    with contextlib.suppress(ValueError, OverflowError):
        count = int(float(text))  # not for NaN and infinity
        return count if count >= 0 else None
    return None
