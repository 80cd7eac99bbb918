"""What the machine and the launcher say, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_bridge.gpus import torch_uses_cuda, visible_gpus


@dataclass(frozen=True)
class LaunchFacts:
    """world_size: torchrun's ranks, 1 when started with plain python. num_gpus: CUDA devices this process may use.

    idle_gpus: those that it could use, were the installed torch not built for CPUs.
    """

    world_size: int = 1
    local_world_size: int = 1
    num_gpus: int = 0
    idle_gpus: int = 0

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str], devices: Path = Path("/dev"), *, uses_cuda: bool | None = None
    ) -> LaunchFacts:
        """uses_cuda: whether torch does; None asks the installed one."""
        ranks, local = (int(environment.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        gpus = visible_gpus(environment, devices)
        usable = torch_uses_cuda() if uses_cuda is None else uses_cuda
        return cls(ranks, local, gpus if usable else 0, 0 if usable else gpus)
