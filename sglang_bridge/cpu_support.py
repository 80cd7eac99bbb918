"""What a machine without a GPU needs before SGLang or transformers can be imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_MISSING_SCHEMAS = ("nms", "qnms")


def cpu_shim_path() -> Path:
    """The directory that goes first on PYTHONPATH of CPU servers."""
    return Path(__file__).parent / "cpu_shim"


def declare_torchvision_schemas() -> None:
    """Let torchvision be imported where its C++ operators cannot be loaded (a CUDA build beside a CPU torch).

    torchvision's Python part registers shapes for operators that only its C++ part declares; declaring them is
    enough, nobody calls them. Call it before importing transformers.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    import torch

    if hasattr(torch.ops.torchvision, "nms"):
        return
    for binary in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(binary))
            return
        except OSError:
            continue
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _MISSING_SCHEMAS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    # The declarations vanish with the object: tie it to the namespace they are in.
    torch.ops.torchvision.__dict__["_declared_without_binary"] = library
