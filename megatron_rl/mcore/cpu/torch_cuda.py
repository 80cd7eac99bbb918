"""CPU replacements for the parts of `torch.cuda` that Megatron-Core calls without asking."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device

_CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn")
NO_OPERATIONS = (
    "set_device",
    "set_stream",
    "synchronize",
    "empty_cache",
    "reset_peak_memory_stats",
)
MEMORY_COUNTERS = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
)


class IdleStream:
    """Stands for `torch.cuda.Stream` where nothing runs later, so that waiting does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> IdleStream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdleStream)

    def __hash__(self) -> int:
        return 0

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or CpuEvent()

    def synchronize(self) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...


class CpuStream(IdleStream):
    """The stream of a CPU, whose work is synchronous."""

    device = _CPU


class CpuEvent:
    """Stands for `torch.cuda.Event`. Every event has already happened and no time passes."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def query(self) -> bool:
        return True

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, *_: Any) -> None: ...


def is_patched() -> bool:
    """True after `patch_torch_cuda`."""
    return issubclass(torch.cuda.Stream, CpuStream)


def patch_torch_cuda() -> None:
    """Replace streams, events, memory counters and random states of `torch.cuda` by CPU ones."""
    cuda: Any = torch.cuda
    stream = CpuStream()
    cuda.Stream = CpuStream
    cuda.Event = CpuEvent
    cuda.current_device = lambda: _CPU
    cuda.device_count = lambda: 0
    cuda.current_stream = cuda.default_stream = lambda *_, **__: stream
    cuda.stream = lambda *_: contextlib.nullcontext()
    for name in NO_OPERATIONS:
        setattr(cuda, name, lambda *_, **__: None)
    for name in MEMORY_COUNTERS:
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.manual_seed = cuda.manual_seed_all = _seed_cpu
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def patch_torch_factories() -> None:
    """Redirect `device="cuda"` in factory calls to the CPU, and report CUDA tensor types.

    Megatron writes device="cuda", or the current device, into factory calls, and tests for CUDA
    tensor types.
    """
    # torch caches its factory functions on first use. Fill that cache with the originals, because
    # a `torch.device("meta")` context does not recognise the replacements.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    module: Any = torch.nn.Module
    module.cuda = lambda self, *_, **__: self
    original_type = tensor.type

    def cuda_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original_type(self, dtype, *args, **kwargs)
        name = original_type(self)
        return name if ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)

    tensor.type = cuda_type


def _seed_cpu(seed: int) -> torch.Generator:
    return torch.default_generator.manual_seed(int(seed))


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def cpu_factory(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return cpu_factory
