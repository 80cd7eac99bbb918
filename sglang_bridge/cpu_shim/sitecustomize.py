"""Python runs this at the start of every process of a CPU server.

Invariant: exactly two remedies, each applied when the module it concerns is imported, and none to anything else.
The third blocker, the compiled `sgl_kernel` package, is answered by the package of that name in this directory.
"""

import importlib.abc
import importlib.machinery
import sys

_HOST_POOL = "sglang.srt.mem_cache.pool_host.common"


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declare the operators whose C++ half cannot load beside a CPU torch, just before torchvision is imported."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            from sglang_bridge.cpu_support import declare_torchvision_schemas

            declare_torchvision_schemas()
        return None


class _AfterHostPool(importlib.abc.MetaPathFinder):
    """Give the host copy of the recorded routes plain memory: SGLang registers it with CUDA on every other device."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != _HOST_POOL:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        execute = spec.loader.exec_module

        def execute_and_register(module):
            execute(module)
            module.ALLOC_MEMORY_FUNCS["cpu"] = _allocate_unpinned

        spec.loader.exec_module = execute_and_register
        return spec


def _allocate_unpinned(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
    return allocator.allocate(dims, dtype=dtype, device=device)


sys.meta_path[:0] = [_BeforeTorchvision(), _AfterHostPool()]
