"""A stream of named tensors cut into flat byte buckets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

NamedTensors = Iterator[tuple[str, torch.Tensor]]


@dataclass
class Bucket:
    """Tensors laid end to end. flat: uint8 [bytes]. last: True for the last bucket of a stream."""

    flat: torch.Tensor
    last: bool
    names: list[str] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the tensors inside `flat`."""
        start = 0
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            end = start + shape.numel() * dtype.itemsize
            yield name, self.flat[start:end].view(dtype).view(shape)
            start = end


def iterate_buckets(
    named_tensors: NamedTensors, *, bucket_bytes: int, device: torch.device
) -> Iterator[Bucket]:
    """Cut `named_tensors` into buckets of at most `bucket_bytes` on `device`.

    A tensor larger than that gets its own bucket. A yielded bucket is valid only until the next one
    is requested.

    Raises `ValueError` on a repeated name, an empty tensor or an empty stream.
    """
    filler = _Filler(bucket_bytes, device)
    names: set[str] = set()
    for name, tensor in named_tensors:
        if name in names:
            raise ValueError(f"weight {name}: sent twice")
        if tensor.numel() == 0:
            raise ValueError(f"weight {name}: has no elements")
        names.add(name)
        if not filler.fits(tensor):
            yield filler.take(last=False)
        filler.add(name, tensor)
    if not names:
        raise ValueError("there are no weights to send")
    yield filler.take(last=True)


class _Filler:
    """Copies tensors into one reused buffer, or into a new one if a tensor is larger than that."""

    def __init__(self, bucket_bytes: int, device: torch.device) -> None:
        self._buffer = torch.empty(bucket_bytes, dtype=torch.uint8, device=device)
        self._num_bytes = 0
        self._bucket = Bucket(self._buffer, last=False)

    def fits(self, tensor: torch.Tensor) -> bool:
        if self._num_bytes == 0:
            return True
        is_aligned = self._num_bytes % tensor.dtype.itemsize == 0
        return is_aligned and self._num_bytes + tensor.nbytes <= self._buffer.numel()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if data.numel() > self._buffer.numel():
            self._bucket.flat = data.to(self._buffer.device, copy=True)
        else:
            self._buffer[self._num_bytes : self._num_bytes + data.numel()].copy_(data)
        self._num_bytes += data.numel()
        self._bucket.names.append(name)
        self._bucket.dtypes.append(tensor.dtype)
        self._bucket.shapes.append(tensor.shape)

    def take(self, *, last: bool) -> Bucket:
        bucket = self._bucket
        bucket.last = last
        bucket.flat = bucket.flat[: self._num_bytes]
        self._bucket = Bucket(self._buffer, last=False)
        self._num_bytes = 0
        return bucket
