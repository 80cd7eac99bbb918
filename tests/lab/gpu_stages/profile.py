"""Profile of one launch of the log-probability kernel, by Nsight Compute."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from tests.lab.gpu_stages.stage import Report, Setting, StageSkipped, run

KERNELS = Path(__file__).resolve().parents[3] / "kernels"
_TOOLKIT = "/usr/local/cuda/bin"
_KERNEL = "logprob_entropy"
_OPTIONS = ("--clock-control", "none", "--section", "SpeedOfLight")
# Counters of a GPU may be reserved for its administrator, and a container may lack them.
_REFUSALS = ("ERR_NVGPUCTRPERM", "ERR_NVCMPGPU", "not supported", "Failed to initialize")
_PROGRAM = """
import torch
from espo_kernels import token_logprob_entropy
logits = torch.randn(16_384, 151_936, device="cuda", dtype=torch.bfloat16)
targets = torch.randint(151_936, (16_384,), device="cuda")
with torch.no_grad():
    token_logprob_entropy(logits, targets)
torch.cuda.synchronize()
"""
_METRIC = re.compile(
    r"^\s*(Duration|[A-Z][\w ()/]*Throughput|SM Frequency)\s+(\S+)\s+([\d.,]+)$", re.M
)


def profile(setting: Setting, report: Report) -> None:
    """Note the duration and the throughput of the first launch, in percent of the peak."""
    if setting.small or not torch.cuda.is_available():
        raise StageSkipped("Nsight Compute needs CUDA")
    tool = shutil.which("ncu") or shutil.which("ncu", path=_TOOLKIT)
    if tool is None:
        raise StageSkipped(f"ncu (Nsight Compute) is neither on PATH nor in {_TOOLKIT}")
    command = [tool, *_OPTIONS, "--kernel-name", f"regex:{_KERNEL}", "--launch-count", "1"]
    process = subprocess.run(
        [*command, sys.executable, "-c", _PROGRAM], cwd=KERNELS, capture_output=True, text=True
    )
    output = process.stdout + process.stderr
    print(output)
    refusal = find_refusal(output)
    if refusal:
        raise StageSkipped(f"ncu cannot profile here: {refusal}")
    report.require("ncu_succeeded", process.returncode == 0)
    metrics = read_metrics(output)
    for name, number in metrics.items():
        report.note(name, number)
    report.require("kernel_was_profiled", _KERNEL in output and bool(metrics))


def read_metrics(output: str) -> dict[str, float]:
    """Return duration, frequencies and throughputs of a launch, by name and unit."""
    return {
        f"{name} [{unit}]": float(number.replace(",", ""))
        for name, unit, number in _METRIC.findall(output)
    }


def find_refusal(output: str) -> str:
    """Return the line that says why ncu cannot profile on this machine, empty without one."""
    lines = [line.strip() for line in output.splitlines() if line.startswith("==")]
    return next((line for line in lines if any(text in line for text in _REFUSALS)), "")[:200]


if __name__ == "__main__":
    run(profile)
