"""Marks tests that give torch's CPU build a CUDA device of their own."""

import pytest

from sglang_bridge.server.gpus import torch_uses_cuda

NEEDS_CPU_BUILD = pytest.mark.skipif(torch_uses_cuda(), reason="this torch is a CUDA build")
