"""A stream of named tensors cut into flat byte buckets."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from sglang_bridge.weights.fused_layout import update_unit

NamedTensors = Iterator[tuple[str, torch.Tensor]]


@dataclass
class Bucket:
    """Tensors laid end to end. flat: uint8 [bytes]. slot: the memory that it occupies."""

    flat: torch.Tensor
    names: list[str] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    slot: Slot | None = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the tensors inside `flat`."""
        start = 0
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            end = start + shape.numel() * dtype.itemsize
            yield name, self.flat[start:end].view(dtype).view(shape)
            start = end

    def release(self) -> None:
        """Let another bucket use the memory. The contents are not valid any more."""
        if self.slot is not None:
            self.slot.free.set()


class Slot:
    """Memory of one bucket, allocated when it is first used. free: set while no bucket uses it."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self.free = threading.Event()
        self.free.set()
        self._device = device
        self._memory: torch.Tensor | None = None

    def memory(self) -> torch.Tensor:
        """The memory, uint8 [num_bytes]."""
        if self._memory is None:
            self._memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
        return self._memory


def iterate_buckets(
    named_tensors: NamedTensors, *, bucket_bytes: int, device: torch.device, slots: int = 1
) -> Iterator[Bucket]:
    """Cut `named_tensors` into buckets of at most `bucket_bytes` on `device`.

    Tensors of one update unit must follow one another, and stay in one bucket. A unit larger than
    a bucket gets its own one. No tensor is held beside the buckets.

    slots: how many buckets may exist at a time. Before the next one is filled, this waits until one
    of them is released. With one slot, asking for the next bucket releases the last one.

    Raises `ValueError` on a repeated name, an empty tensor, and parts of a unit that are apart.
    """
    pool = itertools.cycle([Slot(bucket_bytes, device) for _ in range(slots)])
    filler: _Filler | None = None
    checker = _Checker()
    for name, tensor in named_tensors:
        is_new_unit = checker.begins_unit(name, tensor)
        if filler is None:
            filler = _Filler(next(pool), device)
        elif not filler.fits(tensor) and (is_new_unit or filler.has_earlier_units):
            unit = [] if is_new_unit else filler.cut_unit(copy=slots == 1)
            bucket = filler.take()
            yield bucket
            if slots == 1:
                bucket.release()
            filler = _Filler(next(pool), device)
            filler.add_unit(unit)
            del unit
        filler.add(name, tensor, is_new_unit=is_new_unit)
    if filler is not None:
        yield filler.take()


class _Checker:
    """Follows a stream's names and units."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._units: set[str] = set()
        self._unit = ""

    def begins_unit(self, name: str, tensor: torch.Tensor) -> bool:
        """True if the tensor is the first of its unit. Raises `ValueError` for a wrong tensor."""
        if name in self._names:
            raise ValueError(f"weight {name}: sent twice")
        if tensor.numel() == 0:
            raise ValueError(f"weight {name}: has no elements")
        self._names.add(name)
        unit = update_unit(name)
        if unit == self._unit:
            return False
        if unit in self._units:
            raise ValueError(
                f"weight {name}: apart from the other tensors of {unit}, which an engine fuses. "
                "They must follow one another"
            )
        self._units.add(unit)
        self._unit = unit
        return True


class _Filler:
    """Copies tensors into one slot, or into new memory if a unit is larger than that."""

    def __init__(self, slot: Slot, device: torch.device) -> None:
        slot.free.wait()
        slot.free.clear()
        self._slot = slot
        self._device = device
        self._flat: torch.Tensor | None = None
        self._bucket = Bucket(torch.empty(0, dtype=torch.uint8), slot=slot)
        self._num_bytes = 0
        # Of the current unit: its first byte and its first tensor
        self._unit_start = 0
        self._unit_index = 0

    @property
    def has_earlier_units(self) -> bool:
        """True if the bucket holds more than the current unit."""
        return self._unit_index > 0

    def fits(self, tensor: torch.Tensor) -> bool:
        is_aligned = self._num_bytes % tensor.dtype.itemsize == 0
        return is_aligned and self._num_bytes + tensor.nbytes <= self._slot.num_bytes

    def add(self, name: str, tensor: torch.Tensor, *, is_new_unit: bool) -> None:
        if is_new_unit:
            self._unit_start = self._num_bytes
            self._unit_index = len(self._bucket.names)
        if self._num_bytes % tensor.dtype.itemsize:
            raise ValueError(
                f"weight {name}: {tensor.dtype} after {self._num_bytes} bytes of its unit is not "
                "aligned, and engines refuse that"
            )
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        end = self._num_bytes + data.numel()
        if end <= self._slot.num_bytes:
            self._slot.memory()[self._num_bytes : end].copy_(data)
        elif not self._num_bytes:
            self._flat = data.to(self._device)
        else:
            earlier = self._slot.memory() if self._flat is None else self._flat
            self._flat = torch.cat([earlier[: self._num_bytes], data.to(self._device)])
        self._num_bytes = end
        self._bucket.names.append(name)
        self._bucket.dtypes.append(tensor.dtype)
        self._bucket.shapes.append(tensor.shape)

    def add_unit(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        for index, (name, tensor) in enumerate(tensors):
            self.add(name, tensor, is_new_unit=index == 0)

    def cut_unit(self, *, copy: bool) -> list[tuple[str, torch.Tensor]]:
        """Remove the current unit from the bucket; returns its tensors.

        Without a copy they are views, valid until the slot is used again.
        """
        bucket = self._bucket
        bucket.flat = self._slot.memory()[: self._num_bytes]
        unit = list(bucket.tensors())[self._unit_index :]
        if copy:
            unit = [(name, tensor.clone()) for name, tensor in unit]
        for parts in (bucket.names, bucket.dtypes, bucket.shapes):
            del parts[self._unit_index :]
        self._num_bytes = self._unit_start
        return unit

    def take(self) -> Bucket:
        bucket = self._bucket
        flat = self._slot.memory() if self._flat is None else self._flat
        bucket.flat = flat[: self._num_bytes]
        return bucket
