"""Facts about this machine that decide which archives fit it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_SECONDS = 90.0
_ROOT = Path(__file__).resolve().parents[3]
# triton is not imported, because its import alone may need a driver
_PROGRAM = """
import importlib.metadata, json, torch
has_gpu = torch.cuda.is_available()
major, minor = torch.cuda.get_device_capability() if has_gpu else (0, 0)
try:
    triton = importlib.metadata.version("triton")
except importlib.metadata.PackageNotFoundError:
    triton = None
print(json.dumps({
    "torch": torch.__version__.partition("+")[0],
    "cuda": torch.version.cuda,
    "triton": triton,
    "architecture": 10 * major + minor if has_gpu else None,
    "device": torch.cuda.get_device_name() if has_gpu else "",
}))
"""
# What the trainer itself asks before it uses Transformer Engine. Only the first launch of a kernel
# shows if the driver takes a library whose machine code was reduced to one architecture.
_TE_PROGRAM = """
import sys
from megatron_rl.mcore.gpu_libraries import transformer_engine_fault
sys.exit(transformer_engine_fault() or None)
"""
_MAX_REASON_LENGTH = 300


@dataclass(frozen=True)
class Facts:
    """Versions and GPU of this machine. None: it has none, or nothing is known.

    architecture: compute capability without the dot, such as 90. device: the GPU's name.
    """

    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"
    torch: str | None = None
    triton: str | None = None
    cuda: str | None = None
    architecture: int | None = None
    device: str = ""


def read_facts(environment: Mapping[str, str]) -> Facts:
    """Ask torch in a process of its own, which may see at most one GPU."""
    output, problem = _run(["-c", _PROGRAM], environment)
    if problem:
        return Facts()
    return Facts(**json.loads(output.strip().splitlines()[-1]))


def transformer_engine_problem(environment: Mapping[str, str]) -> str:
    """Run a kernel of Transformer Engine on the GPU. Returns why it fails, empty if it runs.

    environment: has Transformer Engine on its path.
    """
    _, problem = _run(["-c", _TE_PROGRAM], environment)
    return problem


def _run(arguments: list[str], environment: Mapping[str, str]) -> tuple[str, str]:
    """Run Python. Returns its output, and why it failed, empty if it did not."""
    try:
        process = subprocess.run(
            [sys.executable, *arguments],
            cwd=_ROOT,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "", f"it took longer than {_SECONDS:.0f} s"
    if process.returncode == 0:
        return process.stdout, ""
    lines = [line for line in process.stderr.splitlines() if line.strip()]
    reason = lines[-1].strip()[:_MAX_REASON_LENGTH] if lines else "no message"
    return process.stdout, f"code {process.returncode}: {reason}"
