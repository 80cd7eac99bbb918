"""Imports of Megatron-Core print nothing that needs no action, and not torch's compiler.

A job of one rank has the time limits of the settings.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
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


# Each line of output begins with what it is about
RANK = """
import sys, torch
from megatron_rl.mcore import compat
compat.install()
from megatron.core.transformer.moe.router import TopKRouter
from megatron_rl.mcore.layers.varlen_attention import VarlenAttention
assert not VarlenAttention().supports(*[torch.ones(4, 2, 8)] * 3)
assert torch.compile.__module__ == "torch", "restored after the import"
assert not hasattr(TopKRouter._apply_expert_bias, "_torchdynamo_orig_callable")
from megatron.core.transformer import TransformerConfig
TransformerConfig(
    num_layers=1, hidden_size=8, num_attention_heads=1,
    recompute_granularity="selective", recompute_modules=["core_attn"],
)
compiler = {"torch._inductor.compile_fx", "torch._dynamo"}
print("compiler", sorted(compiler & set(sys.modules)))

from torch.distributed import distributed_c10d
from megatron_rl.config.schema import ParallelSettings
from megatron_rl.mcore.parallel import initialize, shutdown
initialize(ParallelSettings(timeout_s=7.5), seed=1)
groups = list(distributed_c10d._world.pg_map)
timeouts = {g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups}
print("timeouts", [len(groups), *timeouts])
shutdown()
"""


@pytest.fixture(scope="module")
def rank() -> subprocess.CompletedProcess[str]:
    """A rank that imports Megatron-Core and creates its groups."""
    path = f"{ROOT}:{ROOT / 'kernels'}"
    process = subprocess.run(
        [sys.executable, "-c", RANK],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process


def printed(rank: subprocess.CompletedProcess[str], subject: str) -> list[object]:
    """Return the list that a rank printed about a subject."""
    lines = [line.partition(" ") for line in rank.stdout.splitlines()]
    (text,) = (text for name, _, text in lines if name == subject)
    values: list[object] = ast.literal_eval(text)
    return values


def test_selective_recomputation_is_no_warning(rank: subprocess.CompletedProcess[str]) -> None:
    """Each rank would print it at each start, although attention is not Transformer Engine's."""
    assert "transformer_engine" not in rank.stderr


def test_cpu_rank_does_not_import_the_compiler_of_torch(
    rank: subprocess.CompletedProcess[str],
) -> None:
    """The import takes two to three seconds in every rank, and a C++ compiler may be missing."""
    assert printed(rank, "compiler") == []


def test_no_group_waits_longer_than_the_setting_says(
    rank: subprocess.CompletedProcess[str],
) -> None:
    """Megatron counts in minutes."""
    count, *timeouts = printed(rank, "timeouts")
    assert isinstance(count, int) and count > 10
    assert timeouts == [7.5]
