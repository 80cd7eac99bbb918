"""Child processes of the kernel tests."""

from __future__ import annotations

import os
from pathlib import Path

import espo_kernels

ROOT = Path(__file__).parents[2]


def importable(**extra: str) -> dict[str, str]:
    """An environment with this source tree first on the path, one thread a process and `extra`."""
    paths = [
        str(Path(espo_kernels.__file__).parents[1]),
        str(ROOT),
        os.environ.get("PYTHONPATH", ""),
    ]
    search_path = os.pathsep.join(path for path in paths if path)
    return {**os.environ, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1", **extra}
