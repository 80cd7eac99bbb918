"""Number of ranks and GPUs, found without importing torch, and the state of Transformer Engine.

Only an installed Transformer Engine is imported, behind torch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from megatron_rl.contracts.refusal import ConfigurationRefused, Refusal
from sglang_bridge.server.gpus import torch_uses_cuda, visible_gpus


@dataclass(frozen=True)
class LaunchFacts:
    """Facts about the launcher and the machine.

    world_size: number of ranks that torchrun starts, 1 without torchrun.
    local_world_size: number of these on this node.
    num_gpus: number of CUDA devices that this process can use.
    idle_gpus: number of CUDA devices that it cannot use because torch is built for CPUs.
    transformer_engine: whether Transformer Engine is installed and can be imported.
    transformer_engine_error: why an installed Transformer Engine cannot be imported, else empty.
    """

    world_size: int = 1
    local_world_size: int = 1
    num_gpus: int = 0
    idle_gpus: int = 0
    transformer_engine: bool = False
    transformer_engine_error: str = ""

    @classmethod
    def from_environment(
        cls,
        environment: Mapping[str, str],
        devices: Path = Path("/dev"),
        *,
        uses_cuda: bool | None = None,
    ) -> LaunchFacts:
        """Read the facts from environment variables and device files.

        uses_cuda: whether torch is built for CUDA. None: look at the installed torch.

        Raises `ConfigurationRefused` if torchrun's variables hold no positive number.
        """
        world_size = _number_of_ranks(environment, "WORLD_SIZE")
        local_world_size = _number_of_ranks(environment, "LOCAL_WORLD_SIZE")
        gpus = visible_gpus(environment, devices)
        can_use_gpus = torch_uses_cuda() if uses_cuda is None else uses_cuda
        return cls(
            world_size=world_size,
            local_world_size=local_world_size,
            num_gpus=gpus if can_use_gpus else 0,
            idle_gpus=0 if can_use_gpus else gpus,
            transformer_engine=has_transformer_engine(),
            transformer_engine_error=transformer_engine_error(),
        )


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed and can be imported."""
    return find_spec("transformer_engine") is not None and not transformer_engine_error()


@functools.cache
def transformer_engine_error() -> str:
    """Return why an installed Transformer Engine cannot be imported, else an empty text.

    An engine that was built for another torch is installed, and its import ends with an undefined
    symbol.
    """
    if find_spec("transformer_engine") is None:
        return ""
    try:
        importlib.import_module("torch")  # it loads the NCCL that the engine's library needs
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a broken binary may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


def _number_of_ranks(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "1")
    if not value.isdecimal() or not int(value):
        rule = "torchrun sets this environment variable to a positive whole number of ranks"
        remedy = f"Start with torchrun, or unset {name}"
        raise ConfigurationRefused([Refusal(name, value, rule, remedy)])
    return int(value)
