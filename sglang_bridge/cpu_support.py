"""What SGLang needs on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path


def cpu_shim_path() -> Path:
    """The directory that goes first on PYTHONPATH of CPU servers."""
    return Path(__file__).parent / "cpu_shim"
