"""Handles of device memory, which other threads of this process can open."""

from __future__ import annotations

from typing import Any

import torch


class SharedMemory:
    """Stands for CUDA's handles of memory. A real one can be opened by other processes, too.

    num_handles: made so far. num_opened: how often one was opened.
    """

    def __init__(self) -> None:
        self.num_handles = 0
        self.num_opened = 0
        self._storages: dict[bytes, torch.UntypedStorage] = {}

    def install(self) -> None:
        """Replace torch's functions for handles, and forget them where torch does."""
        storage: Any = torch.UntypedStorage
        storage._share_cuda_ = lambda memory, *_: self._share(memory)
        storage._new_shared_cuda = classmethod(lambda _, *values: self._open(*values))
        cuda: Any = torch.cuda
        collect = cuda.ipc_collect

        def ipc_collect() -> None:
            collect()
            self._storages.clear()

        cuda.ipc_collect = ipc_collect

    def _share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        """Return device, handle, size, offset, and what a real handle needs to count references."""
        handle = f"handle-{self.num_handles}".encode()
        self.num_handles += 1
        self._storages[handle] = storage
        return storage.device.index, handle, storage.nbytes(), 0, b"", 0, b"", False

    def _open(self, device: int, handle: bytes, size: int, *_: Any) -> torch.UntypedStorage:
        storage = self._storages[handle]
        if (storage.device.index, storage.nbytes()) != (device, size):
            raise RuntimeError(f"{handle!r} is no memory of {size} bytes on device {device}")
        self.num_opened += 1
        return storage
