"""What the machine and the launcher say, without importing torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LaunchFacts:
    """world_size: torchrun's ranks, 1 when started with plain python. num_gpus: CUDA devices this process may use."""

    world_size: int = 1
    local_world_size: int = 1
    num_gpus: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], device_directory: Path = Path("/dev")) -> LaunchFacts:
        return cls(
            world_size=int(environment.get("WORLD_SIZE", "1")),
            local_world_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
            num_gpus=_count_gpus(environment.get("CUDA_VISIBLE_DEVICES"), device_directory),
        )


def is_first_rank() -> bool:
    """Whether this process speaks for the job: rank 0 of torchrun, or the only process."""
    return os.environ.get("RANK", "0") == "0"


def _count_gpus(visible: str | None, device_directory: Path) -> int:
    present = len(list(device_directory.glob("nvidia[0-9]*")))
    if visible is None:
        return present
    listed = 0
    for device in visible.split(","):
        if not device.strip() or device.strip() == "-1":  # CUDA ignores what follows an invalid entry
            break
        listed += 1
    return min(present, listed)
