"""Checks servers that somebody else started, before any work depends on them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sglang_bridge.admin import AdminClient
from sglang_bridge.errors import EngineUnhealthy, RequestFailed
from sglang_bridge.handle import refuse_unsupported_parallelism
from sglang_bridge.keys import RunKeys

_POLL_SECONDS = 0.5


def require_external_engines(
    urls: Sequence[str], keys: RunKeys, *, deadline_seconds: float, return_routes: bool, tp: int, dtype: str
) -> None:
    """Wait, at most `deadline_seconds` for all, until every URL passes. Raises `EngineUnhealthy` naming the URL."""
    deadline = time.monotonic() + deadline_seconds
    for url in urls:
        engine = AdminClient(url, api_key=keys.api_key, admin_api_key=keys.admin_api_key)
        while not engine.is_ready():
            if time.monotonic() > deadline:
                raise EngineUnhealthy(
                    f"engine.urls: {url} did not answer within {deadline_seconds:.0f} s; start that server, correct "
                    "the address, or raise engine.start_timeout_s"
                )
            time.sleep(_POLL_SECONDS)
        try:
            info = engine.server_info()
        except RequestFailed as error:
            raise EngineUnhealthy(
                f"engine.urls: {url} answers but refuses requests ({error}); engine.key_file must hold its keys"
            ) from error
        _require_settings(url, info, return_routes=return_routes, tp=tp, dtype=dtype)


def _require_settings(url: str, info: dict[str, Any], *, return_routes: bool, tp: int, dtype: str) -> None:
    if return_routes and not info.get("enable_return_routed_experts"):
        raise EngineUnhealthy(
            f"engine.urls: {url} does not record expert routes; start it with --enable-return-routed-experts, or set "
            "train.replay_routes=false"
        )
    try:
        refuse_unsupported_parallelism(info, tp=tp)
    except ValueError as error:
        raise EngineUnhealthy(f"engine.urls: {url}: {error}") from error
    if info.get("dtype", dtype) != dtype:
        raise EngineUnhealthy(f"engine.dtype={dtype}: {url} runs in {info['dtype']}; start it with --dtype {dtype}")
