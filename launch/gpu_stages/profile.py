"""Profile of one launch of the log-probability kernel, by Nsight Compute."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from launch.gpu_stages.stage import Report, Setting, StageSkipped, run

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
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
    tool = shutil.which("ncu")
    if tool is None:
        raise StageSkipped("ncu (Nsight Compute) is not installed")
    command = [tool, *_OPTIONS, "--kernel-name", f"regex:{_KERNEL}", "--launch-count", "1"]
    process = subprocess.run(
        [*command, sys.executable, "-c", _PROGRAM], cwd=KERNELS, capture_output=True, text=True
    )
    output = process.stdout + process.stderr
    print(output)
    refusal = next((line for line in output.splitlines() if _is_refusal(line)), None)
    if refusal is not None:
        raise StageSkipped(f"ncu cannot profile here: {refusal.strip()[:200]}")
    report.require("ncu_succeeded", process.returncode == 0)
    for name, unit, number in _METRIC.findall(output):
        report.note(f"{name} [{unit}]", float(number.replace(",", "")))
    report.require("kernel_was_profiled", _KERNEL in output and len(report.values) > 1)


def _is_refusal(line: str) -> bool:
    return line.startswith("==") and any(text in line for text in _REFUSALS)


if __name__ == "__main__":
    run(profile)
