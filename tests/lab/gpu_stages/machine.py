"""Description of the machine: device, versions, and the optional libraries that import."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import resource
import shutil
from pathlib import Path

import torch

from tests.lab.gpu_stages.stage import Report, Setting, run

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
# Triton needs a C compiler. The others are needed by one stage at most.
_TOOLS = ("cc", "nvcc", "ncu", "compute-sanitizer")
_OPTIONAL = ("sglang", "transformer_engine.pytorch", "apex")


def machine(setting: Setting, report: Report) -> None:
    """Note the device, the versions and the optional libraries."""
    report.note("python", platform.python_version())
    for name in _VERSIONS:
        try:
            report.note(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            report.note(name, None)
    _note_host(setting, report)
    report.note("imports", [name for name in _OPTIONAL if _imports(name)])
    if setting.small:
        report.note("device", platform.processor() or platform.machine())
        return
    report.require("cuda_available", torch.cuda.is_available())
    if not torch.cuda.is_available():
        return
    properties = torch.cuda.get_device_properties(0)
    report.note("device", properties.name)
    report.note("capability", f"{properties.major}.{properties.minor}")
    report.note("memory_gib", round(properties.total_memory / 2**30, 1))
    report.note("free_memory_gib", round(torch.cuda.mem_get_info()[0] / 2**30, 1))
    report.note("driver", _driver())


def _note_host(setting: Setting, report: Report) -> None:
    report.note("cuda", torch.version.cuda)
    report.note("cores", os.cpu_count())
    for tool in _TOOLS:
        report.note(tool, shutil.which(tool) is not None)
    report.note("open_files", resource.getrlimit(resource.RLIMIT_NOFILE))
    for name, path in (("shared_memory", "/dev/shm"), ("scratch", str(setting.scratch))):
        with contextlib.suppress(OSError):
            report.note(f"{name}_free_gib", round(shutil.disk_usage(path).free / 2**30, 1))


def _driver() -> str:
    """The first line of the driver's own description, empty without one."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return ""


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # A broken library may raise anything, and counts as missing.
        return False
    return True


if __name__ == "__main__":
    run(machine)
