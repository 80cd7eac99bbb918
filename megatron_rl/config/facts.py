"""What the machine and the launcher say, without importing torch."""

from __future__ import annotations

import itertools
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


def _count_gpus(visible: str | None, device_directory: Path) -> int:
    present = len(list(device_directory.glob("nvidia[0-9]*")))
    if visible is None:
        return present
    # CUDA ignores what follows an invalid entry.
    listed = list(itertools.takewhile(lambda device: device.strip() not in ("", "-1"), visible.split(",")))
    return min(present, len(listed))
