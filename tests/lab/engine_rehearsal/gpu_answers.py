"""Answers as a GPU does, in a process that imports SGLang afterwards.

SGLang asks torch for the device, its memory and its capability, and Python for the packages of a
CUDA image. Nothing here computes: a kernel that is called fails.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.lab.engine_rehearsal.requests import GpuFacts

# Packages that SGLang declares for CUDA, and imports where a CUDA device is.
_CUDA_PACKAGES = (
    "cuda",
    "cutlass",
    "deep_ep",
    "deep_gemm",
    "flash_attn",
    "flash_mla",
    "flashinfer",
    "humming",
    "nvshmem",
    "quack",
    "sgl_kernel",
    "tilelang",
    "torch_memory_saver",
    "torchvision",
    "triton_kernels",
)


class _Name(type):
    """A name of an absent package: a class that gives further names, and decorates functions."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _make_name(name)

    def __call__(cls, *args: Any, **options: Any) -> Any:
        decorates = len(args) == 1 and not options and callable(args[0])
        return args[0] if decorates else cls

    def __getitem__(cls, _key: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def _make_name(name: str) -> Any:
    return _Name(name, (), {})


class _EmptyLoader(importlib.abc.Loader):
    """Makes a module in which every name exists."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        def find(name: str) -> Any:
            if name.startswith("__") and name.endswith("__"):
                raise AttributeError(name)
            return _make_name(name)

        module = ModuleType(spec.name, "An empty stand-in for a CUDA package.")
        module.__path__ = []
        module.__getattr__ = find  # type: ignore[method-assign]
        vars(module)["__version__"] = "0"
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


class _EmptyPackages(importlib.abc.MetaPathFinder):
    """Finds the CUDA packages that this machine lacks, and all their modules."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(fullname, _EmptyLoader(), is_package=True)


def answer_as(gpu: GpuFacts) -> None:
    """Change torch and the import of packages in this process, for good."""
    # transformers remembers its first answer, and must not take a stand-in for a package.
    from transformers.utils import is_torchvision_available

    is_torchvision_available()
    absent = frozenset(name for name in _CUDA_PACKAGES if importlib.util.find_spec(name) is None)
    sys.meta_path.append(_EmptyPackages(absent))
    properties = SimpleNamespace(
        name=gpu.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        total_memory=gpu.memory,
        multi_processor_count=gpu.multiprocessors,
        is_integrated=0,
    )
    library: Any = torch.cuda
    torch.version.cuda = "13.0"
    library.is_available = lambda: True
    library.is_initialized = lambda: True
    library.device_count = lambda: gpu.count
    library.current_device = lambda: 0
    library.set_device = lambda _device: None
    library.synchronize = lambda _device=None: None
    library.get_device_capability = lambda _device=None: gpu.capability
    library.get_device_name = lambda _device=None: gpu.name
    library.get_device_properties = lambda _device=None: properties
    library.mem_get_info = lambda _device=None: (gpu.memory, gpu.memory)
    library.Stream = _make_name("Stream")
    library.Event = _make_name("Event")
