"""One real SGLang server for tests."""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import pytest

from megatron_rl.models.families import read_shape
from megatron_rl.models.fp8_weights import quantization_config
from megatron_rl.rollouts.collector.engines.engine_pool import EnginePool
from sglang_bridge.admin import AdminClient
from sglang_bridge.errors import RequestFailed
from sglang_bridge.keys import RunKeys, create_keys
from sglang_bridge.server.lifeline import Lifeline
from sglang_bridge.server.managed_engine import ManagedEngine
from sglang_bridge.settings import ServerPlace, ServerSettings
from tests.support.fake_engine import hold

# In the environment of a CPU engine, 0 leaves the inputs of FP8 products as they are
ROUND_ACTIVATIONS = "SGLANG_BRIDGE_ROUND_ACTIVATIONS"


@contextlib.contextmanager
def running_engine(
    model_path: Path,
    directory: Path,
    *,
    max_running_requests: int = 128,
    dtype: Literal["float32", "bfloat16"] = "float32",
    keys: RunKeys | None = None,
    tp: int = 1,
    ep: int = 1,
    extra_args: Sequence[str] = (),
) -> Iterator[ManagedEngine]:
    """One server on CPU, healthy, ended afterwards."""
    lifeline = Lifeline()
    settings = ServerSettings(
        max_running_requests=max_running_requests,
        dtype=dtype,
        tp=tp,
        ep=ep,
        extra_args=["--weight-version=0", *extra_args],
    )
    place = ServerPlace(model_path=str(model_path), device="cpu")
    engine = ManagedEngine.start(
        settings,
        place,
        keys=keys or create_keys(),
        log_path=directory / "engine.log",
        lifeline=lifeline,
    )
    try:
        engine.wait_healthy(240)
        yield engine
    finally:
        engine.stop()
        lifeline.close()


@contextlib.contextmanager
def running_fp8_engine(
    settings: ServerSettings, model_path: Path, directory: Path
) -> Iterator[ManagedEngine]:
    """One FP8 server on CPU that starts without weights, as a run starts it.

    It does not round activations, so that float32 passes over the same weights agree with it.
    """
    lifeline = Lifeline()
    config = quantization_config(read_shape(model_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ROUND_ACTIVATIONS, "0")
        server = ManagedEngine.start(
            settings,
            ServerPlace(model_path=str(model_path), device="cpu", quantization=config),
            keys=create_keys(),
            log_path=directory / "engine.log",
            lifeline=lifeline,
        )
    try:
        server.wait_healthy(240)
        yield server
    finally:
        server.stop()
        lifeline.close()


async def interrupt(pool: EnginePool, engine: ManagedEngine) -> None:
    """Stop all responses of a pool in the middle, until `proceed`."""
    pause = asyncio.create_task(hold(pool))
    while not pause.done():
        await asyncio.to_thread(engine.admin().abort_all)
        await asyncio.sleep(0.05)


def flush_idle_cache(admin: AdminClient, *, seconds: float = 20.0) -> None:
    """Drop every cached prefix once the engine runs no request.

    An engine refuses while a request runs, and for a moment after it has answered. Raises
    `RequestFailed` after so many seconds.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            admin.flush_cache()
            return
        except RequestFailed:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
