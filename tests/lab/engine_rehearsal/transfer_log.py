"""Records which part of a tensor is copied into which part of which parameter.

All tensors are on torch's meta device. They have shapes and storages, but no data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.lab.engine_rehearsal.requests import Parameter, TensorSpec, Transfer

Region = tuple[int, tuple[int, ...], tuple[int, ...]]
_FILLS = frozenset({"fill_", "zero_"})


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _region(tensor: torch.Tensor) -> Region:
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


def count_elements(regions: Iterable[Region]) -> int:
    """The elements of regions that do not overlap."""
    total = 0
    for _, sizes, _ in regions:
        total += int(torch.Size(sizes).numel())
    return total


class TransferLog(TorchDispatchMode):
    """Follows the tensors of a stream into parameters while the mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: list[torch.Tensor] = []  # keeps every storage's number unique
        self._names: dict[int, frozenset[str]] = {}
        self._whole: dict[str, torch.Tensor] = {}
        self._writes: dict[int, set[Region]] = defaultdict(set)
        self._reads: dict[str, set[Region]] = defaultdict(set)
        self._targets: dict[str, set[int]] = defaultdict(set)

    def stream(self, specs: Iterable[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield named meta tensors, and remember them."""
        for spec in specs:
            dtype = getattr(torch, spec.dtype)
            tensor = torch.empty(spec.shape, dtype=dtype, device="meta")
            self._alive.append(tensor)
            self._names[_storage(tensor)] = frozenset({spec.name})
            self._whole[spec.name] = tensor
            yield spec.name, tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "copy_":
            self._copy(args[0], args[1])
        elif name in _FILLS:
            self._writes[_storage(args[0])].add(_region(args[0]))
        else:
            self._follow((args, kwargs), result)
        return result

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        storage = _storage(target)
        self._writes[storage].add(_region(target))
        names = self._names.get(_storage(source), frozenset())
        if storage not in self._names:
            self._names[storage] = frozenset()
        self._names[storage] |= names
        for name in names:
            self._targets[name].add(storage)
            whole = self._whole[name]
            is_part = _storage(whole) == _storage(source)
            self._reads[name].add(_region(source if is_part else whole))

    def _follow(self, inputs: Any, result: Any) -> None:
        """A tensor that is computed from tensors of the stream carries their names."""
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        names = frozenset().union(*(self._names.get(_storage(t), frozenset()) for t in tensors))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and names and _storage(leaf) not in self._names:
                self._alive.append(leaf)
                self._names[_storage(leaf)] = names

    def parameters(self, model: torch.nn.Module) -> list[Parameter]:
        """The parameters of a model, with what is missing of each."""
        return [
            Parameter(
                name=name,
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype).removeprefix("torch."),
                num_missing=self._count_missing(parameter),
            )
            for name, parameter in model.named_parameters()
        ]

    def _count_missing(self, parameter: torch.Tensor) -> int:
        """0 for the scales of an FP8 KV cache, which SGLang marks: without them it takes 1."""
        if getattr(parameter, "_skip_weight_check", False):
            return 0
        return max(0, parameter.numel() - count_elements(self._writes[_storage(parameter)]))

    def transfers(self, model: torch.nn.Module) -> list[Transfer]:
        """The ways of all tensors of the stream."""
        owners = {_storage(parameter): name for name, parameter in model.named_parameters()}
        return [
            Transfer(
                tensor=name,
                parameters=sorted(
                    owners[storage] for storage in self._targets[name] if storage in owners
                ),
                num_read=count_elements(self._reads[name]),
                regions=sorted(self._reads[name]),
            )
            for name in self._whole
        ]
