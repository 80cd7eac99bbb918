"""What the machine and the launcher say, without importing torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.contracts.refusal import ConfigurationRefused, Refusal
from sglang_bridge.server.gpus import torch_uses_cuda, visible_gpus

_OF_TORCHRUN = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class LaunchFacts:
    """world_size: torchrun's ranks, 1 when started with plain python. num_gpus: CUDA devices this
    process may use.

    idle_gpus: those that it could use, were the installed torch not built for CPUs.
    transformer_engine: whether it is installed.
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
        """uses_cuda: whether torch does; None asks the installed one. Raises
        `ConfigurationRefused`.
        """
        ranks, local = (environment.get(name, "1") for name in _OF_TORCHRUN)
        for name, value in zip(_OF_TORCHRUN, (ranks, local), strict=True):
            if not value.isdecimal() or not int(value):
                rule = "torchrun puts a whole number of ranks into this variable of the environment"
                raise ConfigurationRefused(
                    [Refusal(name, value, rule, f"Start with torchrun, or unset {name}")]
                )
        gpus = visible_gpus(environment, devices)
        usable = torch_uses_cuda() if uses_cuda is None else uses_cuda
        gpus, idle = (gpus, 0) if usable else (0, gpus)
        return cls(int(ranks), int(local), gpus, idle, has_transformer_engine())


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed; nothing is imported."""
    return importlib.util.find_spec("transformer_engine") is not None
