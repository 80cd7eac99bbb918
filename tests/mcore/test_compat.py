"""Imports of Megatron-Core print nothing that needs no action."""

import os
import subprocess
import sys
from pathlib import Path

# Then as a CUDA build of torch on a machine with the CUDA toolkit and without a GPU
IMPORT = """
import sys
from megatron_rl.run.open_run import open_run
from megatron_rl.mcore import compat
assert "torch.utils.cpp_extension" not in sys.modules
import torch
torch.cuda._is_compiled = lambda: True
torch.cuda.is_available = lambda: False
torch.version.cuda = "13.0"
compat.install()
import megatron.core.nccl_allocator, torch.utils.cpp_extension
print("CUDA_HOME", torch.utils.cpp_extension.CUDA_HOME)
"""


def test_a_cuda_build_without_a_gpu_is_not_reported_by_each_rank(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", IMPORT],
        env=os.environ | {"CUDA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert f"CUDA_HOME {tmp_path}" in process.stdout, "torch has looked for the toolkit"
    assert "CUDA runtime" not in process.stderr


SELECTIVE = """
from megatron_rl.mcore import compat
compat.install()
from megatron.core.transformer import TransformerConfig
TransformerConfig(
    num_layers=1, hidden_size=8, num_attention_heads=1,
    recompute_granularity="selective", recompute_modules=["core_attn"],
)
"""


def test_selective_recomputation_is_no_warning() -> None:
    """Each rank would print it at each start, although attention is not Transformer Engine's."""
    process = subprocess.run(
        [sys.executable, "-c", SELECTIVE],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "transformer_engine" not in process.stderr
