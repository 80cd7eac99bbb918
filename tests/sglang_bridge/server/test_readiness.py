"""Checks of a server that somebody else started."""

import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError
from sglang_bridge.keys import create_keys
from sglang_bridge.server.nccl import deterministic_environment
from sglang_bridge.server.ports import choose_port
from sglang_bridge.server.readiness import require_external_engines
from sglang_bridge.settings import ServerSettings

INFO: dict[str, Any] = {"enable_return_routed_experts": True, "tp_size": 1, "dtype": "float32"}


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, info = self.server.answer  # type: ignore[attr-defined]
        body = json.dumps(info).encode() if self.path == "/server_info" else b""
        self.send_response(status if self.path == "/server_info" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as running:
        running.answer = (200, INFO)  # type: ignore[attr-defined]
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def check(
    port: int,
    *,
    return_routes: bool = True,
    model_path: str | None = None,
    **settings: Any,
) -> list[Engine]:
    engines = [Engine(url=f"http://127.0.0.1:{port}")]
    server_settings = ServerSettings(**{"start_timeout_s": 0.6, **settings})
    return require_external_engines(
        engines,
        create_keys(),
        server_settings,
        return_routes=return_routes,
        model_path=model_path,
    )


def test_matching_server_passes(server: Any) -> None:
    check(server.server_port)


def write_model(directory: Path, **settings: Any) -> Path:
    directory.mkdir()
    configuration: dict[str, Any] = {
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "vocab_size": 200,
        "moe_intermediate_size": 128,
    }
    configuration |= settings
    (directory / "config.json").write_text(json.dumps(configuration))
    return directory


@pytest.mark.parametrize(
    ("settings", "difference"),
    [
        ({"rope_theta": 20000.0}, r"rope_theta=20000.0 instead of 10000.0"),
        ({"vocab_size": 300}, "vocab_size=300 instead of"),
        ({"moe_intermediate_size": 256}, "moe_intermediate_size=256 instead of"),
        ({"torch_dtype": "bfloat16", "new_key": 1}, ""),
    ],
)
def test_a_server_of_another_model_is_refused(
    server: Any, tmp_path: Path, settings: dict[str, Any], difference: str
) -> None:
    model = write_model(tmp_path / "model")
    other_model = write_model(tmp_path / "other", **settings)
    server.answer = (200, INFO | {"model_path": str(other_model)})
    if not difference:
        check(server.server_port, model_path=str(model))
        return
    with pytest.raises(EngineError, match=difference):
        check(server.server_port, model_path=str(model))
    # Another machine may have another model there
    server.answer = (200, INFO | {"model_path": str(tmp_path / "absent")})
    check(server.server_port, model_path=str(model))


def test_server_without_routes_passes_without_replay(server: Any) -> None:
    server.answer = (200, {"enable_return_routed_experts": False, "tp_size": 1})
    check(server.server_port, return_routes=False)
    with pytest.raises(EngineError, match="--enable-return-routed-experts"):
        check(server.server_port)


def test_address_on_which_nothing_listens_is_refused() -> None:
    start = time.monotonic()
    with pytest.raises(
        EngineError, match=r"nothing listens there \(connection refused\); .*start_timeout_s"
    ):
        check(choose_port("127.0.0.1", None), start_timeout_s=9.0)
    assert 1.5 <= time.monotonic() - start < 8.0, "a sixth of the timeout"


def test_unknown_host_name_is_refused_early() -> None:
    with pytest.raises(EngineError, match=r"no-such-host\.invalid:1: its name is not known"):
        require_external_engines(
            [Engine(url="http://no-such-host.invalid:1")],
            create_keys(),
            ServerSettings(start_timeout_s=0.6),
            return_routes=True,
        )


def test_hanging_server_gets_the_whole_timeout() -> None:
    refusal = pytest.raises(EngineError, match=r"did not answer within 1 s; start that server")
    with socket.create_server(("127.0.0.1", 0)) as silent, refusal:
        check(silent.getsockname()[1])


def test_incorrect_keys_are_refused(server: Any) -> None:
    server.answer = (401, {})
    with pytest.raises(EngineError, match=r"engine.key_file"):
        check(server.server_port)


@pytest.mark.parametrize("info", [[], "busy", 3, None])
def test_a_server_without_settings_is_refused(server: Any, info: Any) -> None:
    server.answer = (200, info)
    with pytest.raises(EngineError, match=r"not as SGLang does.*no JSON object.*a proxy"):
        check(server.server_port)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tp_size", "one"),
        ("tp_size", [1]),
        ("ep_size", {"a": 1}),
        ("pp_size", [2]),
        ("moe_runner_backend", ["triton"]),
        ("model_path", "a\0b"),
    ],
)
def test_settings_of_other_types_are_refused(server: Any, key: str, value: Any) -> None:
    server.answer = (200, {**INFO, key: value})
    with pytest.raises(EngineError, match=r"127\.0\.0\.1.*another type.*a proxy"):
        check(server.server_port)


def test_an_engine_has_the_parallel_sizes_that_it_reports(server: Any) -> None:
    server.answer = (200, {**INFO, "tp_size": 4, "ep_size": 2, "pp_size": 1, "dp_size": 1})
    (engine,) = check(server.server_port)
    assert (engine.tp, engine.ep) == (4, 2)


@pytest.mark.parametrize("key", ["pp_size", "dp_size"])
def test_pipeline_and_data_parallel_servers_are_refused(server: Any, key: str) -> None:
    server.answer = (200, {**INFO, key: 2})
    with pytest.raises(EngineError, match=rf"127\.0\.0\.1.*{key}=2.*start it with 1"):
        check(server.server_port)


def test_dtype_must_match_the_server(server: Any) -> None:
    with pytest.raises(EngineError, match=r"engine.dtype=bfloat16.*runs in float32"):
        check(server.server_port, dtype="bfloat16")


@pytest.mark.parametrize(
    "backend", ["flashinfer_trtllm", "experimental_sgl_trtllm", "triton_kernel"]
)
def test_server_whose_kernels_record_no_routes_is_refused(server: Any, backend: str) -> None:
    server.answer = (200, {**INFO, "moe_runner_backend": backend})
    with pytest.raises(
        EngineError,
        match=rf"{backend}.*--moe-runner-backend triton.*train\.replay=trainer or off",
    ):
        check(server.server_port)
    check(server.server_port, return_routes=False)


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("enable_eplb", True, "weights sent under the checkpoint's ids do not follow them"),
        ("ep_num_redundant_experts", 2, "copies or moves experts"),
        ("init_expert_location", "/tmp/location.json", "copies or moves experts"),
    ],
)
def test_servers_that_would_hold_other_weights_are_refused(
    server: Any, option: str, value: Any, reason: str
) -> None:
    server.answer = (200, {**INFO, option: value})
    flag = option.replace("_", "-")
    for return_routes in (True, False):
        with pytest.raises(
            EngineError,
            match=rf"127\.0\.0\.1.*--{flag}={value}: .*{reason}.*; start it without --{flag}$",
        ):
            check(server.server_port, return_routes=return_routes)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("enable_two_batch_overlap", True),
        ("speculative_algorithm", "EAGLE"),
        ("enable_hierarchical_cache", True),
        ("disaggregation_mode", "prefill"),
        ("moe_a2a_backend", "deepep"),
        ("attn_cp_size", 2),
        ("model_impl", "transformers"),
    ],
)
def test_servers_that_record_other_routes_are_refused(server: Any, option: str, value: Any) -> None:
    server.answer = (200, {**INFO, option: value})
    flag = option.replace("_", "-")
    with pytest.raises(
        EngineError,
        match=rf"--{flag}={value}: .*without --{flag}, or set train\.replay=trainer or off",
    ):
        check(server.server_port)
    check(server.server_port, return_routes=False)


def test_server_with_other_options_passes(server: Any) -> None:
    """SGLang 0.5.23 reports these values. NCCL's settings may equal the trainer's."""
    defaults = {
        "nnodes": 1,
        "context_length": None,
        "load_format": "auto",
        "tokenizer_worker_num": 1,
        "enable_symm_mem": True,
        "ep_num_redundant_experts": 0,
        "init_expert_location": "trivial",
        "elastic_ep_backend": None,
        "moe_a2a_backend": "none",
        "attn_dp_size": 1,
        "radix_cache_backend": None,
        "disaggregation_mode": "null",
        "model_impl": "auto",
    }
    server.answer = (200, {**INFO, **defaults})
    check(server.server_port)


def test_a_deterministic_server_whose_nccl_differs_is_refused(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"device": "cuda", "tp_size": 2, "enable_deterministic_inference": True}
    server.answer = (200, {**INFO, **options})
    with pytest.raises(EngineError, match="NCCL_ALGO=allreduce:tree"):
        check(server.server_port, tp=2)
    for name, value in deterministic_environment({}).items():
        monkeypatch.setenv(name, value)
    check(server.server_port, tp=2)


@pytest.mark.parametrize("backend", ["auto", "triton", "deep_gemm", "flashinfer_trtllm_routed"])
def test_server_whose_kernels_record_routes_passes(server: Any, backend: str) -> None:
    server.answer = (200, {**INFO, "moe_runner_backend": backend})
    check(server.server_port)
