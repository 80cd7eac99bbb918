"""Simulated ranks: one thread for each, with shared memory in place of a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Mail:
    """Shared memory of all ranks of a simulated job, in place of a process group."""

    size: int
    values: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.values = [None] * self.size
        self.barrier = threading.Barrier(self.size, timeout=10)

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        self.barrier.wait()
        self.values[rank] = value
        self.barrier.wait()
        return list(self.values)


# What stands for a process group: the memory of all ranks, and the rank of this thread
Group = tuple[Mail, int]


def gather_bytes(data: bytes, group: Group) -> list[bytes]:
    """Return every rank's bytes, as `training.collectives.gather_bytes` does."""
    mail, rank = group
    return mail.gather(rank, data)


def broadcast_bytes(data: bytes | None, group: Group) -> bytes:
    """Return the bytes of rank 0, as `training.collectives.broadcast_bytes` does."""
    mail, rank = group
    return mail.gather(rank, data)[0]


def run_on_ranks(size: int, work: Callable[[Group], Any]) -> list[Any]:
    """Run `work` on every rank. Returns each rank's result, or its error."""
    mail = Mail(size)

    def work_on(rank: int) -> Any:
        try:
            return work((mail, rank))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work_on, range(size), timeout=30))
