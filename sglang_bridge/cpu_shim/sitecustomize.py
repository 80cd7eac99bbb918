"""Python runs this at the start of every process of a CPU server."""

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


class _Around(importlib.abc.MetaPathFinder):
    """Runs `before` just before a module is imported, and `after` on it just after."""

    def __init__(
        self,
        name: str,
        *,
        before: Callable[[], None] | None = None,
        after: Callable[[ModuleType], None] | None = None,
    ) -> None:
        self._name, self._before, self._after = name, before, after

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
        spec = importlib.util.find_spec(fullname)  # others may be around it too
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenCall(spec.loader, self._after)
        return spec


class _ThenCall(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, after: Callable[[ModuleType], None]) -> None:
        self._loader, self._after = loader, after

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._after(module)


def _stand_in_for_torchvision() -> None:
    """SGLang imports torchvision with its configurations; only models that see images call it.

    The environment of a CPU machine is without it: a build for CUDA breaks transformers, which
    finds it and cannot import it. Here too transformers must not find one: it remembers its first
    answer, so ask before there is anything.
    """
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        return
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
    package, transforms, functional = modules = [
        ModuleType(name, "Nothing; see sitecustomize.") for name in names
    ]
    package.transforms, transforms.functional = transforms, functional  # type: ignore[attr-defined]
    transforms.InterpolationMode = functional.InterpolationMode = None  # type: ignore[attr-defined]
    for module in modules:
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        module.__path__ = []
        sys.modules[module.__name__] = module


def _allocate_unpinned(host_pools: ModuleType) -> None:
    """SGLang registers the host copy of recorded routes with CUDA on every device it does not know."""

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


def _register_batched_attention(registry: ModuleType) -> None:
    """The torch-native backend calls attention once per sequence and layer."""

    def create(runner: Any) -> Any:
        from sglang_bridge.cpu_shim.batched_backend import BatchedTorchNativeBackend

        return BatchedTorchNativeBackend(runner)

    registry.register_attention_backend("torch_native")(create)


def _fork_processes(engine: ModuleType) -> None:
    """SGLang spawns its scheduler and detokenizer, as a GPU's context needs, and each imports all
    of SGLang again.

    The launcher starts its threads after them, so forking is safe; whatever else is started is
    spawned.
    """
    configure, launch = engine._set_envs_and_config, engine.Engine._launch_subprocesses.__func__

    def configure_and_fork(server_args: Any) -> None:
        configure(server_args)
        if server_args.numa_node is None:  # its processes are started by another program
            multiprocessing.set_start_method("fork", force=True)

    def launch_and_spawn(cls: Any, *given: Any, **options: Any) -> Any:
        try:
            return launch(cls, *given, **options)
        finally:
            multiprocessing.set_start_method("spawn", force=True)

    os.register_at_fork(
        after_in_child=lambda: multiprocessing.set_start_method("spawn", force=True)
    )
    engine._set_envs_and_config = configure_and_fork  # type: ignore[attr-defined]
    engine.Engine._launch_subprocesses = classmethod(launch_and_spawn)


def _replaced_by(room: str, function: str) -> Callable[[ModuleType], None]:
    """A function of this directory, imported only where SGLang is: this file runs in all of a
    server.
    """

    def replace(module: ModuleType) -> None:
        getattr(importlib.import_module(f"sglang_bridge.cpu_shim.{room}"), function)(module)

    return replace


_SEEDS = {
    "sglang.srt.sampling.sampling_batch_info": "keep_seeds",
    "sglang.srt.layers.sampler": "draw_by_seed",
}
_SUMS = {
    "sglang.srt.layers.quantization.unquant": "replace_linear",
    "sglang.srt.layers.logits_processor": "replace_lm_head",
    "sglang.srt.layers.moe.fused_moe_native": "replace_experts",
    "sglang.srt.layers.moe.topk": "replace_routing",
    "sglang.srt.layers.sampler": "replace_logprobs",
}

sys.meta_path[:0] = [
    _Around("sglang.srt.configs", before=_stand_in_for_torchvision),
    _Around("sglang.srt.mem_cache.pool_host.common", after=_allocate_unpinned),
    _Around("sglang.srt.entrypoints.engine", after=_fork_processes),
    *(_Around(name, after=_replaced_by("seeded_sampling", how)) for name, how in _SEEDS.items()),
]
if os.environ.get("SGLANG_BRIDGE_BATCHED_ATTENTION") != "0":
    sys.meta_path.insert(
        0,
        _Around(
            "sglang.srt.layers.attention.attention_registry", after=_register_batched_attention
        ),
    )
if os.environ.get("SGLANG_BRIDGE_TRAINER_SUMS") != "0":
    sys.meta_path[:0] = [
        _Around(name, after=_replaced_by("trainer_sums", how)) for name, how in _SUMS.items()
    ]
