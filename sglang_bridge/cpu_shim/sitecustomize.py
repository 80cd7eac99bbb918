"""Changes SGLang for CPUs. Python runs this file at the start of every process of a CPU server."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class _ImportHook(importlib.abc.MetaPathFinder):
    """Calls `before` just before a module is imported, and `after` with the module just after."""

    def __init__(
        self,
        name: str,
        *,
        before: Callable[[], None] | None = None,
        after: Callable[[ModuleType], None] | None = None,
    ) -> None:
        self._name = name
        self._before = before
        self._after = after

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        if self._before is not None:
            self._before()
        if self._after is None:
            return None
        spec = importlib.util.find_spec(fullname)  # the module may have other hooks too
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, self._after)
        return spec


class _CallingLoader(importlib.abc.Loader):
    """Loads a module with another loader, then calls `after` with it."""

    def __init__(self, loader: importlib.abc.Loader, after: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._after = after

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._after(module)


def _stand_in_for_torchvision() -> None:
    """Register an empty torchvision, unless a usable one is installed.

    SGLang imports torchvision with its configurations, but only models that see images call it. The
    environment of a CPU machine does not have it, because transformers would find a CUDA build and
    fail to import it.
    """
    # transformers must not find the stand-in either. It caches its first answer, so this call comes
    # before the stand-in exists.
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        return
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
    modules = [ModuleType(name, "An empty stand-in; see sitecustomize.") for name in names]
    package, transforms, functional = modules
    package.transforms = transforms  # type: ignore[attr-defined]
    transforms.functional = functional  # type: ignore[attr-defined]
    transforms.InterpolationMode = functional.InterpolationMode = None  # type: ignore[attr-defined]
    for module in modules:
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        module.__path__ = []
        sys.modules[module.__name__] = module


def _allocate_unpinned(host_pools: ModuleType) -> None:
    """Allocate the host copy of recorded routes as plain memory.

    SGLang registers it with CUDA on every device that it does not know.
    """

    def allocate(
        dims: Any,
        dtype: Any,
        device: Any,
        pin_memory: bool,
        allocator: Any,
        registration_granularity_bytes: int | None = None,
    ) -> Any:
        return allocator.allocate(dims, dtype=dtype, device=device)

    host_pools.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def _hide_nccl(wrapper: ModuleType) -> None:
    """Let engines of several ranks talk through Gloo alone.

    A CUDA build of torch brings NCCL, which SGLang opens in every build that has it. It cannot be
    used without a GPU. SGLang goes on without it if the library cannot be loaded.
    """

    def refuse(so_file: str | None = None) -> Any:
        raise OSError(f"NCCL ({so_file}) is of no use to an engine on CPUs")

    wrapper.NCCLLibrary = refuse  # type: ignore[attr-defined]


def _register_batched_attention(registry: ModuleType) -> None:
    """Replace the torch-native backend, which calls attention once per sequence and layer."""

    def create(runner: Any) -> Any:
        from sglang_bridge.cpu_shim.batched_backend import BatchedTorchNativeBackend

        return BatchedTorchNativeBackend(runner)

    registry.register_attention_backend("torch_native")(create)


def _fork_processes(engine: ModuleType) -> None:
    """Fork SGLang's scheduler and detokenizer.

    SGLang spawns them, as a GPU's context requires, and each imports all of SGLang again. The
    launcher starts its threads later, so forking is safe. All other processes are spawned.
    """
    configure = engine._set_envs_and_config
    launch = engine.Engine._launch_subprocesses.__func__

    def configure_and_fork(server_args: Any) -> None:
        configure(server_args)
        if server_args.numa_node is None:  # otherwise another program starts the processes
            multiprocessing.set_start_method("fork", force=True)

    def launch_and_spawn(cls: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return launch(cls, *arguments, **options)
        finally:
            multiprocessing.set_start_method("spawn", force=True)

    os.register_at_fork(
        after_in_child=lambda: multiprocessing.set_start_method("spawn", force=True)
    )
    engine._set_envs_and_config = configure_and_fork  # type: ignore[attr-defined]
    engine.Engine._launch_subprocesses = classmethod(launch_and_spawn)


def _call_later(submodule: str, function: str) -> Callable[[ModuleType], None]:
    """Import a function of this directory only when it is called.

    This file runs in all processes of a server, also in those that do not import SGLang.
    """

    def replace(module: ModuleType) -> None:
        getattr(importlib.import_module(f"sglang_bridge.cpu_shim.{submodule}"), function)(module)

    return replace


_SEEDS = {
    "sglang.srt.sampling.sampling_batch_info": "assign_seeds",
    "sglang.srt.layers.sampler": "sample_by_seed",
}
_SUMS = {
    "sglang.srt.layers.quantization.unquant": "replace_linear",
    "sglang.srt.layers.logits_processor": "replace_lm_head",
    "sglang.srt.layers.moe.fused_moe_native": "replace_experts",
    "sglang.srt.layers.moe.topk": "replace_routing",
    "sglang.srt.layers.sampler": "replace_logprobs",
}

_FP8 = {
    "sglang.srt.layers.quantization.fp8": "replace_products",
    "sglang.srt.utils.weight_checker": "list_codes_and_scales",
}

sys.meta_path[:0] = [
    _ImportHook("sglang.srt.configs", before=_stand_in_for_torchvision),
    _ImportHook("sglang.srt.mem_cache.pool_host.common", after=_allocate_unpinned),
    _ImportHook("sglang.srt.entrypoints.engine", after=_fork_processes),
    _ImportHook("sglang.srt.distributed.device_communicators.pynccl_wrapper", after=_hide_nccl),
    *(
        _ImportHook(name, after=_call_later("seeded_sampling", function))
        for name, function in _SEEDS.items()
    ),
    *(
        _ImportHook(name, after=_call_later("block_fp8", function))
        for name, function in _FP8.items()
    ),
]
if os.environ.get("SGLANG_BRIDGE_BATCHED_ATTENTION") != "0":
    sys.meta_path.insert(
        0,
        _ImportHook(
            "sglang.srt.layers.attention.attention_registry", after=_register_batched_attention
        ),
    )
if os.environ.get("SGLANG_BRIDGE_TRAINER_SUMS") != "0":
    sys.meta_path[:0] = [
        _ImportHook(name, after=_call_later("trainer_sums", function))
        for name, function in _SUMS.items()
    ]
