"""Bytes between all ranks, over a process group on the CPU.

group None: there is only this process.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def broadcast_bytes(data: bytes | None, group: dist.ProcessGroup | None) -> bytes:
    """Broadcast bytes from rank 0 (which passes them; the others pass None) and return them
    everywhere.
    """
    if group is None:
        return data or b""
    size = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64)
    dist.broadcast(size, 0, group=group)
    if data is not None:
        buffer = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(0, dtype=torch.uint8)
        )
    else:
        buffer = torch.empty(int(size), dtype=torch.uint8)
    if len(buffer):
        dist.broadcast(buffer, 0, group=group)
    return buffer.numpy().tobytes()


def gather_bytes(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Every rank's bytes, in rank order, on every rank."""
    if group is None:
        return [data]
    world = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[
        : len(data)
    ]
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(parts, padded, group=group)
    return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


def sum_counts(counts: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The sum over all ranks of whole numbers on the CPU, on every rank."""
    if group is not None:
        dist.all_reduce(counts, group=group)
    return counts
