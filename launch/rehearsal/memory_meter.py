"""Measures the device memory of tensors without data."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator

import torch

# The allocator of CUDA rounds sizes up to this.
_BLOCK_BYTES = 512


class MemoryMeter:
    """Counts the bytes of living CUDA storages by kind, and their peak.

    It counts tensors alone: neither the CUDA context, nor NCCL's buffers, nor fragmentation.
    """

    def __init__(self) -> None:
        self._kind = "activations"
        self._storages: dict[int, tuple[str, int]] = {}
        self.current: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    @contextlib.contextmanager
    def kind(self, name: str) -> Iterator[None]:
        """Count new storages under a kind."""
        previous = self._kind
        self._kind = name
        try:
            yield
        finally:
            self._kind = previous

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor, once, until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        num_bytes = -storage.nbytes() // _BLOCK_BYTES * -_BLOCK_BYTES
        self._storages[key] = (self._kind, num_bytes)
        self.current[self._kind] += num_bytes
        weakref.finalize(storage, self._free, key)
        if self.current.total() > self.peak.total():
            self.peak = self.current.copy()

    def relabel(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Count existing storages under another kind."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._storages:
                self._move(key, kind)

    def relabel_all(self, kind: str) -> None:
        """Count all existing storages under another kind."""
        for key in list(self._storages):
            self._move(key, kind)

    def start_peak(self) -> None:
        """Measure the peak from now on."""
        self.peak = self.current.copy()

    def _move(self, key: int, kind: str) -> None:
        old_kind, num_bytes = self._storages[key]
        self._storages[key] = (kind, num_bytes)
        self.current[old_kind] -= num_bytes
        self.current[kind] += num_bytes

    def _free(self, key: int) -> None:
        kind, num_bytes = self._storages.pop(key)
        self.current[kind] -= num_bytes
