"""NCCL's environment variables that trainer and engines must share.

Their common group would hang if one side used other buffers, algorithms or channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError
from sglang_bridge.settings import ServerSettings

# SGLang disables cuMem and NVLS buffers unless its environment sets them.
_BUFFERS = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
# With one of these and tensor parallelism, SGLang 0.5.23 overwrites the variables of
# `deterministic_environment` (arg_groups/attention_hook.py).
_DETERMINISTIC = ("--enable-deterministic-inference", "--rl-on-policy-target")
# SGLang's own variable for the number of channels, and its default
_NUM_CHANNELS = ("SGLANG_DETERMINISTIC_NCCL_NCHANNELS", "8")


def nccl_environment(parent: Mapping[str, str], settings: ServerSettings) -> dict[str, str]:
    """The variables that both sides must have before either of them starts NCCL.

    A user's choice of buffers holds. SGLang's choices for deterministic engines hold for the
    trainer too: its reductions then run as trees, on as many channels.
    """
    variables = {name: parent.get(name, "0") for name in _BUFFERS}
    if settings.tp > 1 and any(map(_is_deterministic, settings.extra_args)):
        variables |= deterministic_environment(parent)
    return variables


def deterministic_environment(parent: Mapping[str, str]) -> dict[str, str]:
    """The variables that SGLang sets for deterministic engines with tensor parallelism."""
    channels = parent.get(*_NUM_CHANNELS)
    return {
        "NCCL_ALGO": "allreduce:tree",
        "NCCL_MIN_NCHANNELS": channels,
        "NCCL_MAX_NCHANNELS": channels,
    }


def require_same_nccl(
    engine: Engine, info: Mapping[str, Any], environment: Mapping[str, str]
) -> None:
    """Refuse a deterministic engine with tensor parallelism if the trainer's NCCL is another.

    info: the engine's `/server_info`. environment: the trainer's. Raises `EngineError`.
    """
    if engine.tp == 1 or info.get("device") != "cuda":
        return
    if not info.get("enable_deterministic_inference"):
        return
    needed_variables = deterministic_environment(environment)
    if any(environment.get(name) != value for name, value in needed_variables.items()):
        words = " ".join(f"{name}={value}" for name, value in needed_variables.items())
        raise EngineError(
            f"engine.urls: {engine.url} runs with --enable-deterministic-inference and "
            f"tp_size={engine.tp}, for which SGLang sets NCCL's algorithm and channels. The group "
            f"for weights hangs unless the trainer has the same; start the run with {words}"
        )


def _is_deterministic(argument: str) -> bool:
    """True for an option that makes an engine deterministic, also where it is abbreviated."""
    option = argument.split("=", 1)[0]
    return option.startswith("--") and any(name.startswith(option) for name in _DETERMINISTIC)
