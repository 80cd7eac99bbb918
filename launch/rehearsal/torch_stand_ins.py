"""Answers for what needs a real GPU in `torch.cuda`, in tensors' methods and in torch's groups.

They change torch for the whole process, which does nothing but rehearse.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from launch.rehearsal.code_places import calling_place
from launch.rehearsal.device_mode import DeviceMode
from launch.rehearsal.gpus import Gpu
from launch.rehearsal.known_values import VALUE_ATTRIBUTE
from launch.rehearsal.order.recorder import Recorder
from megatron_rl.mcore.cpu.torch_cuda import (
    MEMORY_COUNTERS,
    NO_OPERATIONS,
    CpuEvent,
    IdleStream,
)

DEVICE = torch.device("cuda", 0)
# What the CPU's replacements do for themselves
_NO_OPERATIONS = (*NO_OPERATIONS, "manual_seed", "manual_seed_all", "set_rng_state", "_lazy_init")


class Stream(IdleStream):
    """A CUDA stream on which nothing runs."""

    device = DEVICE


def stand_in_for_cuda(gpu: Gpu, gpus_per_node: int) -> None:
    """Let `torch.cuda` report GPUs of one kind."""
    cuda: Any = torch.cuda
    stream = Stream()
    cuda.is_available = lambda: True
    cuda.device_count = lambda: gpus_per_node
    cuda.current_device = lambda: DEVICE
    cuda._exchange_device = cuda._maybe_exchange_device = lambda _: 0  # `torch.cuda.device_of`
    cuda.Stream = Stream
    cuda.Event = CpuEvent
    cuda.current_stream = cuda.default_stream = lambda *_, **__: stream
    cuda.stream = lambda *_: contextlib.nullcontext()
    for name in _NO_OPERATIONS:
        setattr(cuda, name, lambda *_, **__: None)
    for name in MEMORY_COUNTERS:
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.get_device_capability = lambda *_: gpu.capability
    properties = {
        "name": gpu.name,
        "major": gpu.capability[0],
        "minor": gpu.capability[1],
        "total_memory": gpu.memory,
        "multi_processor_count": gpu.processors,
        "warp_size": 32,
    }
    cuda.get_device_properties = lambda *_: type("Properties", (), properties)


def stand_in_for_tensor_methods(mode: DeviceMode) -> None:
    """Answer methods that torch's C++ code would run on data."""
    tensor: Any = torch.Tensor
    fake: Any = FakeTensor
    library: Any = torch
    make_tensor = torch.tensor

    def tensor_on_device(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        options.pop("pin_memory", None)
        if isinstance(data, list | tuple):  # torch reads tensors in it one by one
            data = tree_map(lambda leaf: leaf.item() if torch.is_tensor(leaf) else leaf, data)
        result = make_tensor(data, **options)
        return result if device is None else result.to(device)

    def read_list(self: torch.Tensor) -> Any:
        values = mode.read(self)
        with _disable_current_modes():
            return values.tolist()

    def read_array(self: torch.Tensor, *_: Any, **__: Any) -> Any:
        values = mode.read(self)
        with _disable_current_modes():
            return values.detach().numpy()

    library.tensor = tensor_on_device
    tensor.cuda = lambda self, *_, **__: self.to(DEVICE)
    tensor.pin_memory = lambda self, *_, **__: self
    tensor.record_stream = lambda self, *_: None
    fake.tolist = read_list
    fake.numpy = read_array
    torch.nn.Module._apply = _apply_to_parameters  # type: ignore[method-assign]
    functions: Any = torch.nn.functional
    functions.scaled_dot_product_attention = _attend_efficiently


def _attend_efficiently(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend with the kernel that a GPU takes for any dtype, which keeps no scores.

    Without a GPU, torch would choose plain products. attn_mask: bool.
    """
    bias = None
    if attn_mask is not None:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype)
        bias = bias.expand(*query.shape[:3], key.shape[2])
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale
    )[0]
    return output


def _apply_to_parameters(
    self: torch.nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> torch.nn.Module:
    """Convert parameters and buffers, as `torch.nn.Module._apply` does.

    torch's own function swaps the contents of two tensors, which fails for fake ones.
    """
    new_parameters: dict[int, torch.nn.Parameter] = {}
    for module in self.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in new_parameters:
                new_parameters[id(parameter)] = _convert(parameter, convert)
            module._parameters[name] = new_parameters[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = convert(buffer)
    return self


def _convert(
    parameter: torch.nn.Parameter, convert: Callable[[torch.Tensor], torch.Tensor]
) -> torch.nn.Parameter:
    with torch.no_grad():
        value = convert(parameter.detach())
    result = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
    for name, mark in vars(parameter).items():
        if name not in vars(result) and name != VALUE_ATTRIBUTE:
            setattr(result, name, mark)  # a mark of Megatron's
    return result


def stand_in_for_random_states() -> None:
    """Answer Megatron's requests for the state of the GPU's random generator."""
    from megatron_rl.mcore.seams import replace_random_states

    replace_random_states(lambda *_, **__: torch.get_rng_state(), lambda *_, **__: None)


def join_as(rank: int, world_size: int, recorder: Recorder | None = None) -> None:
    """Join a job of ranks that do not exist. Its groups move nothing."""
    groups: Any = dist
    make_group = dist.new_group

    def new_group(ranks: Any = None, *_: Any, group_desc: str | None = None, **__: Any) -> Any:
        group = make_group(ranks, backend="fake", group_desc=group_desc)
        if recorder is not None:
            members = range(world_size) if ranks is None else ranks
            recorder.add_group(members, group_desc or "", group, calling_place())
        return group

    def gather_objects(results: list[Any], value: Any, group: Any = None) -> None:
        if recorder is not None:
            recorder.start_objects("all_gather_object", group, calling_place())
        results[:] = [value] * len(results)

    def broadcast_objects(_values: list[Any], src: int = 0, group: Any = None, **__: Any) -> None:
        if recorder is not None:
            recorder.start_objects("broadcast_object_list", group, calling_place(), root=src)

    def wait_for_all(group: Any = None, *_: Any, **__: Any) -> None:
        dist.barrier(group)

    groups.new_group = groups.distributed_c10d.new_group = new_group
    groups.all_gather_object = gather_objects
    groups.broadcast_object_list = broadcast_objects
    groups.monitored_barrier = wait_for_all  # torch has it for gloo alone
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


@contextlib.contextmanager
def without_triton_launches() -> Iterator[list[str]]:
    """Record launches of Triton kernels by name, without running them."""
    import triton

    launches: list[str] = []
    jit_function: Any = triton.runtime.jit.JITFunction
    run = jit_function.run

    def record(self: Any, *_: Any, **__: Any) -> None:
        launches.append(self.__name__)

    jit_function.run = record
    try:
        yield launches
    finally:
        jit_function.run = run
