"""Checks servers that somebody else started, before any work depends on them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError, RequestFailed
from sglang_bridge.keys import RunKeys
from sglang_bridge.server.command import RECORDING_RUNNER
from sglang_bridge.server.nccl import require_same_nccl
from sglang_bridge.server.quantization import read_configuration, require_quantization
from sglang_bridge.settings import ServerSettings, unsupported_options

_POLL_SECONDS = 0.5
# After this share of start_timeout_s, an address on which nothing listens counts as incorrect.
_REFUSED_SHARE = 1 / 6
_NOT_RECORDING = frozenset(
    {"flashinfer_trtllm", "experimental_sgl_trtllm", "flashinfer_mxfp4", "triton_kernel"}
)
_OTHER_SERVER = "see whether a proxy or another server answers there"
# Keys of a config.json that change nothing that an engine computes with the trainer's weights
_NO_MATTER = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "initializer_range"}
)


def require_external_engines(
    engines: Sequence[Engine],
    keys: RunKeys,
    settings: ServerSettings,
    *,
    return_routes: bool,
    model_path: str | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> list[Engine]:
    """Wait until every engine answers, and check that it runs with the declared settings.

    The wait is at most `settings.start_timeout_s` for all engines together. While a server loads
    its model, nothing listens on its address: a sixth of that time is allowed for it.

    model_path: the trainer's model; None skips its comparison. quantization: the
    `quantization_config` that every engine must have, None for unquantized ones.

    Returns the engines with the sizes with which they run. Raises `EngineError`, which names
    the URL.
    """
    deadline = time.monotonic() + settings.start_timeout_s
    checked_engines = []
    for engine in engines:
        admin = AdminClient(engine, keys)
        _wait_until_ready(engine, admin, deadline, settings.start_timeout_s)
        try:
            info = admin.server_info()
        except RequestFailed as error:
            problem = f"refuses requests ({error}); engine.key_file must hold its keys"
            if error.status is None:
                problem = f"not as SGLang does ({error}); {_OTHER_SERVER}"
            raise EngineError(f"engine.urls: {engine.url} answers but {problem}") from error
        checked_engine = require_settings(
            engine,
            info,
            settings.dtype,
            return_routes=return_routes,
            model_path=model_path,
            quantization=quantization,
        )
        checked_engines.append(checked_engine)
    return checked_engines


def _wait_until_ready(engine: Engine, admin: AdminClient, deadline: float, timeout: float) -> None:
    """Poll one engine. timeout: `start_timeout_s`, in which all engines must answer."""
    refusal_deadline = time.monotonic() + timeout * _REFUSED_SHARE
    while not admin.is_ready():
        reason = _connection_failure(admin.address)
        if reason is not None and time.monotonic() > refusal_deadline:
            raise EngineError(
                f"engine.urls: {engine.url}: {reason}; correct the address, start that server, or, "
                "if it takes long to load, raise engine.start_timeout_s: a server has a sixth of "
                "it to begin to listen"
            )
        if time.monotonic() > deadline:
            raise EngineError(
                f"engine.urls: {engine.url} did not answer within {timeout:.0f} s; start that "
                "server or correct the address"
            )
        time.sleep(_POLL_SECONDS)


def _connection_failure(address: tuple[str, int]) -> str | None:
    """The reason why nothing listens on an address; None if something does or may listen."""
    try:
        with socket.create_connection(address, timeout=2.0):
            return None
    except ConnectionRefusedError:
        return "nothing listens there (connection refused)"
    except socket.gaierror as error:
        return f"its name is not known ({error.strerror})"
    except OSError:
        return None


def require_settings(
    engine: Engine,
    info: dict[str, Any],
    dtype: str,
    *,
    return_routes: bool,
    environment: Mapping[str, str] | None = None,
    model_path: str | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> Engine:
    """Compare a server's `/server_info` with the declared settings.

    It must also run in a way that weight updates support. Returns the engine with the sizes with
    which it runs. Raises `EngineError`.

    environment: the trainer's; None means this process's. model_path: the trainer's model; None
    skips its comparison. quantization: the `quantization_config` that the engine must have, None
    for an unquantized one.
    """
    try:
        return _require_settings(
            engine,
            info,
            dtype,
            return_routes=return_routes,
            environment=os.environ if environment is None else environment,
            model_path=model_path,
            quantization=quantization,
        )
    except (TypeError, ValueError) as error:
        raise EngineError(
            f"engine.urls: {engine.url}/server_info holds a value of another type than SGLang's "
            f"({error}); {_OTHER_SERVER}"
        ) from error


def _require_settings(
    engine: Engine,
    info: dict[str, Any],
    dtype: str,
    *,
    return_routes: bool,
    environment: Mapping[str, str],
    model_path: str | None,
    quantization: Mapping[str, Any] | None,
) -> Engine:
    if return_routes:
        _require_routes(engine, info)
    _require_supported_options(engine, info, return_routes=return_routes)
    for key in ("pp_size", "dp_size"):
        size = int(info.get(key) or 1)
        if size > 1:
            raise EngineError(
                f"engine.urls: {engine.url} runs with {key}={size}: weight updates need a group "
                "per stage or replica, which is not built; start it with 1 and use more engines or "
                "tensor/expert parallelism instead"
            )
    sizes = {key: int(info.get(f"{key}_size") or 1) for key in ("tp", "ep")}
    engine = msgspec.structs.replace(engine, **sizes)
    if info.get("dtype", dtype) != dtype:
        raise EngineError(
            f"engine.dtype={dtype}: {engine.url} runs in {info['dtype']}; "
            f"start it with --dtype {dtype}"
        )
    require_quantization(engine, info, quantization)
    if model_path is not None:
        _require_same_model(engine, info, Path(model_path))
    require_same_nccl(engine, info, environment)
    return engine


def _require_routes(engine: Engine, info: dict[str, Any]) -> None:
    if not info.get("enable_return_routed_experts"):
        raise EngineError(
            f"engine.urls: {engine.url} does not record expert routes; start it with "
            "--enable-return-routed-experts, or set train.replay=trainer or off"
        )
    runner = info.get("moe_runner_backend")
    if runner in _NOT_RECORDING:
        raise EngineError(
            f"engine.urls: {engine.url} runs its experts with {runner}, which routes inside its "
            f"kernels and records nothing; start it with --moe-runner-backend {RECORDING_RUNNER}, "
            "or set train.replay=trainer or off"
        )


def _require_supported_options(
    engine: Engine, info: dict[str, Any], *, return_routes: bool
) -> None:
    """Refuse options that no managed engine has either."""
    for option in unsupported_options(info):
        if option.harms_routes and not return_routes:
            continue
        other_remedy = ", or set train.replay=trainer or off" if option.harms_routes else ""
        raise EngineError(
            f"engine.urls: {engine.url} runs with {option.name}={option.value}: {option.reason}; "
            f"start it without {option.name}{other_remedy}"
        )


def _require_same_model(engine: Engine, info: dict[str, Any], model_path: Path) -> None:
    """Compare the configurations of both models, if this machine can read the engine's.

    Weights are sent and audited, but not the rest: an engine with another base of the rotary
    embedding, for example, takes all weights and computes other probabilities.
    """
    engine_path = Path(str(info.get("model_path")))
    configuration = read_configuration(model_path / "config.json")
    engine_configuration = read_configuration(engine_path / "config.json")
    differences = [
        f"{key}={engine_configuration[key]!r} instead of {configuration[key]!r}"
        for key in sorted(configuration.keys() & engine_configuration.keys() - _NO_MATTER)
        if engine_configuration[key] != configuration[key]
    ]
    if differences:
        raise EngineError(
            f"engine.urls: {engine.url} serves another model, {engine_path}: its config.json has "
            f"{', '.join(differences)}; start it with {model_path}"
        )
