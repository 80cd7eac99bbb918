"""Marks tests that give torch's CPU build a CUDA device of their own."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from launch.rehearsal.cuda_guard import is_cuda_build

_TORCH = find_spec("torch")
assert _TORCH is not None and _TORCH.origin is not None
NEEDS_CPU_BUILD = pytest.mark.skipif(
    is_cuda_build(Path(_TORCH.origin).parent), reason="this torch is a CUDA build"
)
