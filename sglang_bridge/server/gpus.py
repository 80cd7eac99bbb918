"""Counts GPUs, and checks if the installed torch can use them, without importing torch."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Count the NVIDIA GPUs that a process with this environment may use, by their device files."""
    present = len(list(devices.glob("nvidia[0-9]*")))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    # CUDA ignores everything after an invalid entry.
    valid = itertools.takewhile(lambda device: device.strip() not in ("", "-1"), visible.split(","))
    return min(present, len(list(valid)))


def torch_uses_cuda(search_path: Sequence[str] | None = None) -> bool:
    """True if the installed torch is built for CUDA, judged by its files.

    search_path: folders to look in. None means this interpreter's.
    """
    path = list(sys.path if search_path is None else search_path)
    torch = next(iter(importlib.metadata.distributions(name="torch", path=path)), None)
    if torch is None:
        return False
    file = Path(str(torch.locate_file("torch/version.py")))
    if file.is_file():
        cuda = re.search(r"^cuda\b[^=]*=\s*(\S+)", file.read_text(), flags=re.MULTILINE)
        return cuda is not None and cuda[1] != "None"
    return torch.version.partition("+")[2].startswith("cu")
