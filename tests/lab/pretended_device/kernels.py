"""Runs the CPU's ESPO kernels where Triton would run compiled ones.

No Triton kernel runs on the pretended device. The CPU's kernels compute the same numbers, and they
take what a Triton kernel takes: tensors of the device alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_KERNELS = {
    "espo_kernels.token_logprob_entropy.cpu": ("forward", "backward"),
    "espo_kernels.espo_policy_loss.cpu": ("loss_cpu", "scale_cpu"),
    "espo_kernels.espo_groups.cpu": ("groups_cpu",),
    "espo_kernels.quantize_fp8_blockwise.cpu": ("quantize_cpu",),
}


# Modules whose kernels add or gather over ranks
_COLLECTIVES = (
    "espo_kernels.token_logprob_entropy.vocabulary",
    "espo_kernels.espo_policy_loss.inputs",
)


def install_kernels() -> None:
    """Serve tensors of the device by the CPU's kernels, on the same bytes."""
    import importlib

    from espo_kernels import backends

    for module_name in _COLLECTIVES:
        module: Any = importlib.import_module(module_name)
        module.dist = _DeviceCollectives()

    library: Any = backends
    fastest_backend = backends._fastest_backend

    def backend_of(tensor: torch.Tensor, cpu_needs_numba: bool) -> Any:
        backend = fastest_backend(tensor, cpu_needs_numba)
        return "cpu" if tensor.is_cuda and tensor.dtype != torch.float64 else backend

    library._fastest_backend = backend_of
    for module_name, names in _KERNELS.items():
        module = importlib.import_module(module_name)
        for name in names:
            setattr(module, name, on_device(getattr(module, name)))


class _DeviceCollectives:
    """`torch.distributed` for a kernel that has the device's bytes as tensors of the CPU.

    Such a tensor goes to groups of the device as a tensor of the device, on the same bytes.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_gather(
        self, outputs: list[torch.Tensor], tensor: torch.Tensor, group: dist.ProcessGroup
    ) -> None:
        dist.all_gather(
            [_for_group(output, group) for output in outputs],
            _for_group(tensor, group),
            group=group,
        )

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        dist.all_reduce(_for_group(tensor, group), group=group)


def _for_group(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if tensor.is_cuda or dist.get_backend(group) != dist.Backend.NCCL:
        return tensor
    device_tensor: torch.Tensor = torch.ops.pretended_device.as_device(tensor)
    return device_tensor


def on_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a CPU function, so that it takes and returns tensors of the device, without copies.

    A call with a CPU tensor beside them raises ValueError, as Triton does.
    """

    @functools.wraps(kernel)
    def call(*args: Any) -> Any:
        leaves = list(_tensors(args))
        if not any(leaf.is_cuda for leaf in leaves):
            return kernel(*args)
        if not all(leaf.is_cuda for leaf in leaves):
            raise ValueError(
                f"{kernel.__name__}: a Triton kernel cannot read tensors of the CPU, and got "
                f"shapes {[list(leaf.shape) for leaf in leaves if leaf.is_cpu]} there"
            )
        with torch.no_grad():
            result = kernel(
                *(_map(argument, torch.ops.pretended_device.as_host) for argument in args)
            )
            return _map(result, torch.ops.pretended_device.as_device)

    return call


def _tensors(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(tree):
        yield from _tensors([getattr(tree, field.name) for field in dataclasses.fields(tree)])


def _map(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply a function to the tensors of tuples, lists and dataclasses."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(item, function) for item in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(_map(item, function) for item in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changes = {
            field.name: _map(getattr(tree, field.name), function)
            for field in dataclasses.fields(tree)
            if field.init
        }
        return dataclasses.replace(tree, **changes)
    return tree
