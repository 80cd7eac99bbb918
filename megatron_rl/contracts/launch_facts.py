"""Number of ranks and GPUs, found without importing torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
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
    transformer_engine: whether Transformer Engine is installed.
    """

    world_size: int = 1
    local_world_size: int = 1
    num_gpus: int = 0
    idle_gpus: int = 0
    transformer_engine: bool = False

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
        )


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed, without importing it."""
    return importlib.util.find_spec("transformer_engine") is not None


def _number_of_ranks(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "1")
    if not value.isdecimal() or not int(value):
        rule = "torchrun sets this environment variable to a positive whole number of ranks"
        remedy = f"Start with torchrun, or unset {name}"
        raise ConfigurationRefused([Refusal(name, value, rule, remedy)])
    return int(value)
