"""Description of the machine: device, versions, and the optional libraries that import."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil

import torch

from launch.gpu_stages.stage import Report, Setting, run

_VERSIONS = (
    "torch",
    "triton",
    "transformers",
    "megatron-core",
    "numpy",
    "sglang",
    "transformer-engine",
    "apex",
)
_OPTIONAL = ("sglang", "transformer_engine.pytorch", "apex")


def machine(setting: Setting, report: Report) -> None:
    """Note the device, the versions and the optional libraries."""
    report.note("python", platform.python_version())
    for name in _VERSIONS:
        try:
            report.note(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            report.note(name, None)
    report.note("cuda", torch.version.cuda)
    report.note("cores", os.cpu_count())
    # Triton compiles its launchers.
    report.note("compiler", shutil.which(os.environ.get("CC", "cc")) is not None)
    report.note("imports", [name for name in _OPTIONAL if _imports(name)])
    if setting.small:
        report.note("device", platform.processor() or platform.machine())
        return
    report.require("cuda_available", torch.cuda.is_available())
    properties = torch.cuda.get_device_properties(0)
    report.note("device", properties.name)
    report.note("capability", f"{properties.major}.{properties.minor}")
    report.note("memory_gib", round(properties.total_memory / 2**30, 1))


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # A broken library may raise anything, and counts as missing.
        return False
    return True


if __name__ == "__main__":
    run(machine)
