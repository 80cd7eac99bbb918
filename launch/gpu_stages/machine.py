"""What the machine is: device, versions, and which of the optional libraries import."""

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
    """Device, versions, optional libraries."""
    report.note("python", platform.python_version())
    for name in _VERSIONS:
        try:
            report.note(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            report.note(name, None)
    report.note("cuda", torch.version.cuda)
    report.note("cores", os.cpu_count())
    report.note(
        "compiler", shutil.which(os.environ.get("CC", "cc")) is not None
    )  # Triton compiles its launchers
    report.note("imports", [name for name in _OPTIONAL if _imports(name)])
    if setting.small:
        report.note("device", platform.processor() or platform.machine())
        return
    report.holds("cuda_available", torch.cuda.is_available())
    properties = torch.cuda.get_device_properties(0)
    report.note("device", properties.name)
    report.note("capability", f"{properties.major}.{properties.minor}")
    report.note("memory_gib", round(properties.total_memory / 2**30, 1))


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # a library that is there and broken counts as missing, whatever it raises
        return False
    return True


if __name__ == "__main__":
    run(machine)
