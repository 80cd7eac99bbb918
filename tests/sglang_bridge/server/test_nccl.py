"""NCCL's variables are equal on both sides of the weight group, or the engine is refused."""

from typing import Any

import pytest

from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError
from sglang_bridge.server.command import build_environment
from sglang_bridge.server.nccl import (
    deterministic_environment,
    nccl_environment,
    require_same_nccl,
)
from sglang_bridge.settings import ServerPlace, ServerSettings

GPU = ServerPlace(model_path="/m", device="cuda", gpus=(0, 1))
BUFFERS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
TREES = {
    "NCCL_ALGO": "allreduce:tree",
    "NCCL_MIN_NCHANNELS": "8",
    "NCCL_MAX_NCHANNELS": "8",
}
DETERMINISTIC = "--enable-deterministic-inference"
INFO: dict[str, Any] = {"device": "cuda", "enable_deterministic_inference": True}


def settings_of(*extra_args: str, tp: int = 2) -> ServerSettings:
    return ServerSettings(dtype="bfloat16", tp=tp, extra_args=list(extra_args))


@pytest.mark.parametrize(
    ("settings", "variables"),
    [
        (settings_of(), BUFFERS),
        (settings_of("--random-seed=3"), BUFFERS),
        (settings_of(DETERMINISTIC, tp=1), BUFFERS),
        (settings_of(DETERMINISTIC), BUFFERS | TREES),
        (settings_of("--enable-determ"), BUFFERS | TREES),
        (settings_of("--rl-on-policy-target=fsdp"), BUFFERS | TREES),
    ],
)
def test_trainer_and_engine_start_nccl_alike(
    settings: ServerSettings, variables: dict[str, str]
) -> None:
    """NCCL waits forever when the two sides use other buffers, algorithms or channels."""
    assert nccl_environment({}, settings) == variables
    assert variables.items() <= build_environment(settings, GPU, {}).items()


def test_a_users_buffers_and_channels_hold_on_both_sides() -> None:
    parent = {
        "NCCL_CUMEM_ENABLE": "1",
        "NCCL_ALGO": "Ring",
        "SGLANG_DETERMINISTIC_NCCL_NCHANNELS": "4",
        "HOME": "/h",
    }
    settings = settings_of(DETERMINISTIC)
    variables = nccl_environment(parent, settings)
    assert variables == {
        "NCCL_CUMEM_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_ALGO": "allreduce:tree",  # SGLang overwrites it in the engine
        "NCCL_MIN_NCHANNELS": "4",
        "NCCL_MAX_NCHANNELS": "4",
    }
    assert variables.items() <= build_environment(settings, GPU, parent).items()


def test_a_deterministic_server_needs_the_trainers_variables() -> None:
    engine = Engine(url="http://127.0.0.1:1", tp=4)
    with pytest.raises(EngineError, match=r"tp_size=4.*start the run with NCCL_ALGO=allred"):
        require_same_nccl(engine, INFO, {})
    with pytest.raises(EngineError, match="NCCL_MIN_NCHANNELS=8"):
        require_same_nccl(engine, INFO, TREES | {"NCCL_MIN_NCHANNELS": "4"})
    require_same_nccl(engine, INFO, deterministic_environment({}))


@pytest.mark.parametrize(
    ("tp", "changes"),
    [(1, {}), (2, {"device": "cpu"}), (2, {"enable_deterministic_inference": False})],
)
def test_other_servers_need_none(tp: int, changes: dict[str, Any]) -> None:
    require_same_nccl(Engine(url="http://127.0.0.1:1", tp=tp), INFO | changes, {})
