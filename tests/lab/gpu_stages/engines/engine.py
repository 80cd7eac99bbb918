"""A real engine beside the trainer: weights, audit, sampling and training, twice.

The engine is on the trainer's device, or with the choice `cpu` on the CPU, where SGLang needs none
of its CUDA kernels.
"""

from __future__ import annotations

import importlib.util

import torch

from tests.lab.gpu_stages.stage import Report, Setting, StageSkipped, run

# What an engine on a GPU needs beside SGLang, under its earlier and its present name
_KERNELS = ("sgl_kernel", "sglang_kernel")


def engine(setting: Setting, report: Report) -> None:
    """Start an engine, send it weights, and train on what it generates."""
    on_gpu = torch.cuda.is_available()
    on_cpu_by_choice = "cpu" in setting.choices
    _require_packages(needs_kernels=on_gpu and not on_cpu_by_choice)
    if on_cpu_by_choice and not (on_gpu or setting.small):
        raise StageSkipped("the trainer needs CUDA")
    # These imports need the packages above.
    from tests.lab.gpu_stages.engines.rounds import run_rounds

    dtype = "bfloat16" if on_gpu or on_cpu_by_choice else "float32"
    on_cpu = on_cpu_by_choice or not on_gpu
    run_rounds(setting, report, device="cpu" if on_cpu else "cuda", dtype=dtype)


def _require_packages(*, needs_kernels: bool) -> None:
    """Raise `StageSkipped` with the names of missing packages."""
    names = ("sglang", "xxhash", "zstandard")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise StageSkipped(f"not installed: {', '.join(missing)}")
    if needs_kernels and not any(map(importlib.util.find_spec, _KERNELS)):
        raise StageSkipped(f"SGLang's CUDA kernels are not installed ({' or '.join(_KERNELS)})")


if __name__ == "__main__":
    run(engine)
