"""Runs operations on CUDA tensors without data, and measures them."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from launch.rehearsal.code_places import calling_functions, calling_place
from launch.rehearsal.collective_log import CollectiveLog
from launch.rehearsal.cuda_guard import RehearsalUnavailable
from launch.rehearsal.gpus import Gpu
from launch.rehearsal.known_values import MAX_KNOWN_ELEMENTS, KnownValues, tensors_in
from launch.rehearsal.memory_meter import MemoryMeter

_aten = torch.ops.aten
_DEVICE_OF = torch.ops.prim.device.default
# Integers that the host reads although they depend on weights, by the function that reads them:
# all numbers are finite, and no router differs from the recorded routes.
_HOST_ANSWERS = {
    "_true_on_all_ranks": 1,
    "_agree": 2,  # `megatron_rl.mcore.optimizer._APPLICABLE`
    "layer_disagreement": 0,
    "layer_load": 0,
}
_MAX_REAL_FLOATS = 1 << 12
_SIZED_BY_VALUES = ("aten::nonzero", "aten::masked_select", "aten::repeat_interleave")


class DeviceMode(TorchDispatchMode):
    """Gives CUDA tensors shapes alone, and real values where these decide shapes.

    Small CPU tensors are real. Operations that mix devices fail as they do on GPUs.

    Attributes:
    host_reads: how often the host waited for the device, by place.
    flops: of matrix products, by phase. seconds: by phase, the sum over operations of the larger of
    their arithmetic and their memory traffic at the GPU's peak rates.
    host_answers: values of unknown numbers by the name of a function that reads them. They come
    before the answers that every rehearsal gives.
    """

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.values = KnownValues()
        self.meter = MemoryMeter()
        self.log = CollectiveLog(self.values)
        self.host_reads: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.host_answers: dict[str, float | int] = {}
        self._gpu = gpu

    @property
    def phase(self) -> str:
        return self.log.phase

    def set_phase(self, phase: str) -> None:
        """Count what follows under a part of the step."""
        self.log.phase = phase

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE_OF:  # more than half of all calls: every `tensor.device`
            return args[0].fake_device
        options = kwargs or {}
        if func.namespace == "c10d":
            return self.log.run(func, args)
        if func is _aten._local_scalar_dense.default:
            return self._read_scalar(args[0])
        leaves = tensors_in((args, options))
        if self._stays_on_host(func, leaves, args, options):
            with _disable_current_modes():
                return func(*args, **options)
        if func._schema.name in _SIZED_BY_VALUES and options.get("output_size") is None:
            return self._run_sized(func, leaves, args, options)
        if func is _aten.index.Tensor:
            args = (args[0], self._without_masks(args[1]))
        if self._copies_to_host(func, args, options):
            value = self._copy_to_host(func, args, options)
            if value is not None:
                return value
        return self._run_on_device(func, leaves, args, options)

    def _run_on_device(self, func: Any, leaves: Any, args: Any, options: dict[str, Any]) -> Any:
        """Run an operation on shapes, measure it, and follow the values that are known."""
        if not all(isinstance(leaf, FakeTensor) for leaf in leaves):
            args, options = tree_map(self._as_fake, (args, options))
        output = func(*args, **options)
        self._measure(func, args, options, output)
        self.values.follow(func, args, options, output)
        return output

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a tensor for the host. Unknown ones are answered by the function's name."""
        self._count_host_read()
        value = self.values.get(tensor)
        if value is not None:
            return value
        with _disable_current_modes():
            return torch.full(tensor.shape, self._answer(tensor), dtype=tensor.dtype)

    def _read_scalar(self, tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            with _disable_current_modes():
                return tensor.item()
        value = self.read(tensor)
        with _disable_current_modes():
            return value.item()

    def _answer(self, tensor: torch.Tensor) -> float | int | bool:
        """The value of unknown numbers that the host reads: 1.0, unless they are integers."""
        functions = calling_functions()
        for function in functions:
            if function in self.host_answers:
                return self.host_answers[function]
        if tensor.dtype.is_floating_point or tensor.dtype is torch.bool:
            return 1
        for function in functions:
            if function in _HOST_ANSWERS:
                return _HOST_ANSWERS[function]
        raise RehearsalUnavailable(
            f"{calling_place()}: the host reads integers of shape {tuple(tensor.shape)} that "
            "depend on weights. This part cannot be rehearsed"
        )

    def _stays_on_host(self, func: Any, leaves: Any, args: Any, options: dict[str, Any]) -> bool:
        """True for an operation on real CPU tensors, and for making a small one."""
        device = options.get("device")
        if device is not None and torch.device(device).type == "cuda":
            return False
        if leaves:
            return not any(isinstance(leaf, FakeTensor) for leaf in leaves)
        output = func(*args, **options)
        tensors = tensors_in(output)
        return all(tensor.numel() <= _max_elements(tensor.dtype) for tensor in tensors)

    def _run_sized(self, func: Any, leaves: Any, args: Any, options: dict[str, Any]) -> Any:
        """Run an operation whose output has as many rows as values say."""
        self._count_host_read()
        deciding = leaves[1:] if func._schema.name == "aten::masked_select" else leaves
        if any(self.values.get(leaf) is None for leaf in deciding):
            raise RehearsalUnavailable(
                f"{calling_place()}: {func} has a size that depends on weights"
            )
        if all(self.values.get(leaf) is not None for leaf in leaves):
            value = self.values.run(func, args, options)
            return self._on_device(value, leaves[0].device)
        mask = self.values.get(leaves[1])
        assert mask is not None
        with _disable_current_modes():
            rows = int(torch.broadcast_to(mask, leaves[0].shape).sum())
        output = leaves[0].new_empty(rows)
        self._add_to_memory(output)
        return output

    def _without_masks(self, indices: Any) -> list[Any]:
        """Replace boolean indices by the positions of their true values."""
        positions: list[Any] = []
        for index in indices:
            if index is None or index.dtype is not torch.bool:
                positions.append(index)
                continue
            value = self.values.get(index)
            if value is None:
                raise RehearsalUnavailable(f"{calling_place()}: a mask that depends on weights")
            self._count_host_read()
            with _disable_current_modes():
                columns = value.nonzero(as_tuple=True)
            positions += [self._on_device(column, index.device) for column in columns]
        return positions

    def _on_device(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A fake tensor on a device with a known value."""
        with self.fake_mode:
            tensor = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=device
            )
        self.values.put(tensor, value)
        self._add_to_memory(tensor)
        return tensor

    def _as_fake(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        with _disable_current_modes():
            fake = self.fake_mode.from_tensor(leaf)
        self.values.put(fake, leaf)
        return fake

    def _copies_to_host(self, func: Any, args: Any, options: dict[str, Any]) -> bool:
        if func is not _aten._to_copy.default or not _is_on_device(args[0]):
            return False
        device = options.get("device")
        return device is not None and torch.device(device).type == "cpu"

    def _copy_to_host(self, func: Any, args: Any, options: dict[str, Any]) -> torch.Tensor | None:
        """A real copy of a known value. None for values that the host gets without data."""
        self._count_host_read()
        value = self.values.get(args[0])
        if value is None:
            return None
        with _disable_current_modes():
            copy: torch.Tensor = func(value, **options).clone()
        return copy

    def _measure(self, func: Any, args: Any, options: dict[str, Any], output: Any) -> None:
        tensors = tensors_in(output)
        for tensor in tensors:
            self._add_to_memory(tensor)
        if not any(_is_on_device(tensor) for tensor in tensors):
            return
        formula = flop_registry.get(func.overloadpacket)
        flops = formula(*args, **options, out_val=output) if formula is not None else 0
        self.flops[self.phase] += flops
        if _is_view(func):
            return
        leaves = tensors_in((args, options))
        traffic = sum(leaf.numel() * leaf.element_size() for leaf in (*leaves, *tensors))
        seconds = max(flops / self._gpu.flops, traffic / self._gpu.bandwidth)
        self.seconds[self.phase] += seconds

    def _add_to_memory(self, tensor: torch.Tensor) -> None:
        if _is_on_device(tensor):
            self.meter.add(tensor)

    def _count_host_read(self) -> None:
        self.host_reads[calling_place()] += 1


def _is_on_device(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def _max_elements(dtype: torch.dtype) -> int:
    """The largest CPU tensor that is real. Large floating-point ones are weights."""
    return _MAX_REAL_FLOATS if dtype.is_floating_point else MAX_KNOWN_ELEMENTS


def _is_view(func: Any) -> bool:
    """True for an operation whose result shares its input's memory unchanged."""
    return any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in func._schema.returns
    )
