"""Which GPUs there are, and whether the installed torch can use them, without importing it."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """How many NVIDIA GPUs a process with this environment may use, by their device files."""
    present, visible = (
        len(list(devices.glob("nvidia[0-9]*"))),
        environment.get("CUDA_VISIBLE_DEVICES"),
    )
    if visible is None:
        return present
    # CUDA ignores what follows an invalid entry.
    listed = list(
        itertools.takewhile(lambda device: device.strip() not in ("", "-1"), visible.split(","))
    )
    return min(present, len(listed))


def torch_uses_cuda(search_path: Sequence[str] | None = None) -> bool:
    """Whether the torch installed in `search_path` (None: this interpreter's) is built for CUDA, as
    its files say.
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
