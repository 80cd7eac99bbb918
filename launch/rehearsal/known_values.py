"""Keeps the values of tensors that decide shapes, beside tensors without data.

Fake tensors have shapes and no values. A rehearsal needs some values: the tokens of each expert
decide the sizes of later tensors. They follow from the routes, which are real.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

# Larger tensors hold no values. Routing maps of 65,536 tokens and 256 experts are just smaller.
MAX_KNOWN_ELEMENTS = 1 << 24
VALUE_ATTRIBUTE = "_rehearsal_value"
_FILLS = {"aten::zeros": 0, "aten::zeros_like": 0, "aten::ones_like": 1}
# Floating-point values are kept where a routing map begins as a tensor of zeros. Those that are
# computed depend on weights, or are not needed.
_FLOATS = ("aten::ones", "aten::full", "aten::scalar_tensor", *_FILLS)


class KnownValues:
    """The real CPU tensors behind fake tensors, for those whose values can be computed.

    A value that an unknown value is written into becomes unknown, and so do all its views.
    """

    def __init__(self) -> None:
        self._unknown_storages: set[int] = set()

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor, or None if it is unknown. A real tensor is its own value."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        value: torch.Tensor | None = getattr(tensor, VALUE_ATTRIBUTE, None)
        if value is None or value.untyped_storage()._cdata in self._unknown_storages:
            return None
        return value

    def put(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Give a new fake tensor a value of the same shape."""
        setattr(tensor, VALUE_ATTRIBUTE, value)

    def forget(self, tensor: torch.Tensor) -> None:
        """Make a tensor and all its views unknown."""
        value = getattr(tensor, VALUE_ATTRIBUTE, None)
        if value is None:
            return
        storage = value.untyped_storage()
        if storage._cdata not in self._unknown_storages:
            self._unknown_storages.add(storage._cdata)
            weakref.finalize(storage, self._unknown_storages.discard, storage._cdata)

    def overwrite(self, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        """Write a value into an existing tensor, as a collective does. None is unknown."""
        target = self.get(tensor)
        if target is None:
            return
        if value is None:
            self.forget(tensor)
            return
        with _disable_current_modes():
            target.copy_(value.reshape(target.shape))

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on the values of its arguments, on the CPU."""
        options = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        with _disable_current_modes():
            real_args, real_options = tree_map(self._real, (args, options))
            return func(*real_args, **real_options)

    def follow(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Update the values after an operation on fake tensors, in place or not."""
        outputs = tensors_in(output)
        name = func._schema.name
        is_small = bool(outputs) and max(leaf.numel() for leaf in outputs) <= MAX_KNOWN_ELEMENTS
        if is_small and name in _FILLS:
            with _disable_current_modes():
                value = _fill(outputs[0].shape, _FILLS[name], outputs[0].dtype)
            self.put(outputs[0], value)
        elif is_small and _is_kept(name, outputs) and self._knows_all((args, kwargs)):
            for leaf, value in zip(outputs, tensors_in(self.run(func, args, kwargs)), strict=True):
                if isinstance(leaf, FakeTensor):
                    self.put(leaf, value)
        elif func._schema.is_mutable:
            for tensor in written_tensors(func, args, kwargs):
                self.forget(tensor)

    def _knows_all(self, tree: Any) -> bool:
        return all(self.get(leaf) is not None for leaf in tensors_in(tree))

    def _real(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return self.get(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _fill(shape: torch.Size, value: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros or ones. Zeros take no memory until something else is written.

    The moments of an optimizer are such tensors, and larger than a machine without GPUs.
    """
    if value or not shape.numel():
        return torch.full(shape, value, dtype=dtype)
    data = np.zeros(shape.numel() * dtype.itemsize, np.uint8)
    return torch.from_numpy(data).view(dtype).reshape(shape)


def _is_kept(name: str, outputs: Sequence[torch.Tensor]) -> bool:
    """True for an operation whose values are kept: of integers, or of constant floats."""
    return name in _FLOATS or not any(leaf.dtype.is_floating_point for leaf in outputs)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of nested lists, tuples and dicts. Much faster than torch's own function."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    tensors = []
    for item in tree:
        if isinstance(item, torch.Tensor):
            tensors.append(item)
        elif isinstance(item, list | tuple | dict):
            tensors += tensors_in(item)
    return tensors


def written_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes into."""
    tensors = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        tensors += tensors_in(value)
    return tensors
