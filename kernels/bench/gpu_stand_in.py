"""Lets the kernels be launched at full size without a GPU: tensors have shapes, but no data.

Tensors say that they are on a GPU, and are torch's meta tensors. A launch compiles the kernel for
the arguments that it got, as Triton does on a GPU, and is recorded instead of run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that start no kernel: they allocate, or look at the same memory in another way.
_WITHOUT_A_KERNEL = frozenset(
    {"empty", "empty_like", "empty_strided", "detach", "alias", "_unsafe_view", "lift_fresh"}
)


class Argument(NamedTuple):
    """A tensor that a kernel got."""

    numel: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class TritonLaunch:
    """One launch of a Triton kernel.

    device: the current one. tensors: by argument name. parameters: names of the arguments that the
    machine code takes, in order. constants: the values that it was compiled for. binary: Triton's
    compiled kernel.
    """

    kernel: str
    device: int
    programs: int
    tensors: Mapping[str, Argument]
    parameters: Sequence[str]
    constants: Mapping[str, Any]
    binary: Any


@dataclass(frozen=True)
class TorchLaunch:
    """One launch of a kernel of torch's. num_bytes: of its result."""

    operation: str
    num_bytes: int


Launch = TritonLaunch | TorchLaunch


class _GpuTensor(torch.Tensor):
    """A meta tensor that says it is on a GPU.

    To torch's shape functions, which run while no dispatch mode is active, it is a meta tensor.
    index: of the GPU.
    """

    index = 0

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        gpu = torch.device("cuda", self.index)
        return gpu if torch._C._len_torch_dispatch_stack() else torch.device("meta")

    def get_device(self) -> int:
        return self.index


class _OnGpu(TorchFunctionMode):
    """Sends what is created on a GPU, or moved to it, to meta tensors."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_on_gpu = _is_gpu(kwargs.get("device")) or any(map(_is_gpu, args))
        if not is_on_gpu or func is torch.device:
            return func(*args, **kwargs)
        result = func(*map(_to_meta, args), **{k: _to_meta(v) for k, v in kwargs.items()})
        return result.as_subclass(_GpuTensor) if isinstance(result, torch.Tensor) else result


def _is_gpu(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def _to_meta(value: Any) -> Any:
    return torch.device("meta") if _is_gpu(value) else value


class _TorchKernels(TorchDispatchMode):
    """Records torch's own kernels on tensors of the GPU."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_on_gpu = isinstance(result, torch.Tensor) and result.is_meta
        if is_on_gpu and not func.is_view and name not in _WITHOUT_A_KERNEL:
            self.launches.append(TorchLaunch(name, result.nbytes))
        return result


class _Pointer:
    """A tensor as Triton sees it: its dtype, and where it begins in its allocation."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self.offset = tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self.offset

    def ptr_range(self) -> int:
        return 0


class _Driver:
    """Answers Triton as GPUs of one compute capability do, and torch when it changes the device."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.capability = capability
        self.target = GPUTarget("cuda", capability, 32)
        self.device = 0

    def exchange_device(self, device: int) -> int:
        """Make a device the current one, unless it is negative. Returns the one before."""
        before = self.device
        if device >= 0:
            self.device = device
        return before

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps compiled kernels by device

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


@contextmanager
def gpu_stand_in(capability: int, tensor_device: int = 0) -> Iterator[list[Launch]]:
    """Within it, tensors on a GPU have shapes alone, and every kernel is recorded.

    Triton kernels are compiled for the compute capability: 90 for H100 and H200, 100 for B200.
    All tensors are on GPU `tensor_device`, while GPU 0 is the current one.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    function: Any = JITFunction
    run = function.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        pointers = [_Pointer(a) if isinstance(a, torch.Tensor) else a for a in args]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            binary = run(self, *pointers, grid=grid, warmup=True, **options)
        launches.append(_triton_launch(self, args, grid, binary, gpus.device))
        return binary

    gpus = _Driver(capability)
    before = driver._active
    function.run = record
    driver.set_active(gpus)
    try:
        with (
            patch.object(_GpuTensor, "index", tensor_device),
            patch.object(torch.cuda, "_exchange_device", gpus.exchange_device),
            patch.object(torch.cuda, "_maybe_exchange_device", gpus.exchange_device),
            _OnGpu(),
            _TorchKernels(launches),
        ):
            yield launches
    finally:
        function.run = run
        driver._active = before


def _triton_launch(
    function: Any, args: tuple[Any, ...], grid: Sequence[int], binary: Any, device: int
) -> TritonLaunch:
    names = function.arg_names
    programs = 1
    for size in grid:
        programs *= size
    constants = {names[path[0]]: value for path, value in binary.src.constants.items()}
    return TritonLaunch(
        kernel=function.__name__,
        device=device,
        programs=programs,
        tensors={
            name: Argument(value.numel(), value.element_size())
            for name, value in zip(names, args, strict=False)
            if isinstance(value, torch.Tensor)
        },
        parameters=[n for n, kind in binary.src.signature.items() if kind != "constexpr"],
        constants=constants,
        binary=binary,
    )
