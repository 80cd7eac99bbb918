"""Python runs this at the start of every process of a CPU server.

Invariant: exactly two remedies, each applied when the module it concerns is imported, and none to anything else.
The third blocker, the compiled `sgl_kernel` package, is answered by the package of that name in this directory.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_HOST_POOL = "sglang.srt.mem_cache.pool_host.common"


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declare the operators whose C++ half cannot load beside a CPU torch, just before torchvision is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            from sglang_bridge.cpu_support import declare_torchvision_schemas

            declare_torchvision_schemas()
        return None


class _AfterHostPool(importlib.abc.MetaPathFinder):
    """Give the host copy of the recorded routes plain memory: SGLang registers it with CUDA on every other device."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _HOST_POOL:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoadAndRegister(spec.loader)
        return spec


class _LoadAndRegister(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.ALLOC_MEMORY_FUNCS["cpu"] = _allocate_unpinned


def _allocate_unpinned(
    dims: Any,
    dtype: Any,
    device: Any,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> Any:
    return allocator.allocate(dims, dtype=dtype, device=device)


sys.meta_path[:0] = [_BeforeTorchvision(), _AfterHostPool()]
