"""Collectives of bytes and counts over a process group on the CPU.

group None: this process is the only one.
"""

from __future__ import annotations

import msgspec
import torch
import torch.distributed as dist


def broadcast_bytes(data: bytes | None, group: dist.ProcessGroup | None) -> bytes:
    """Broadcast bytes from rank 0 and return them on every rank.

    data: the bytes on rank 0, None on the others.
    """
    if group is None:
        return data or b""
    size = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64)
    dist.broadcast(size, 0, group=group)
    buffer = torch.empty(int(size), dtype=torch.uint8)
    if data:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if len(buffer):
        dist.broadcast(buffer, 0, group=group)
    return buffer.numpy().tobytes()


def gather_bytes(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return every rank's bytes, in rank order, on every rank."""
    if group is None:
        return [data]
    sizes = _gather_sizes(len(data), group)
    row = max(sizes)
    buffer = torch.zeros(row, dtype=torch.uint8)
    if data:
        buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    # One tensor for all ranks: hundreds of small ones cost more than the collective
    rows = torch.empty(len(sizes), row, dtype=torch.uint8)
    dist.all_gather(list(rows), buffer, group=group)
    array = rows.numpy()
    return [array[rank, :size].tobytes() for rank, size in enumerate(sizes)]


def gather_texts(texts: list[str], group: dist.ProcessGroup | None) -> list[str]:
    """Return the texts of all ranks, in rank order, on every rank."""
    parts = gather_bytes(msgspec.msgpack.encode(texts), group)
    return [text for part in parts for text in msgspec.msgpack.decode(part, type=list[str])]


def send_to_rank_zero(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return every rank's bytes, in rank order, on rank 0, and an empty list on the others.

    Only ranks with bytes send any, and only rank 0 holds the bytes of other ranks.
    """
    if group is None:
        return [data]
    sizes = _gather_sizes(len(data), group)
    if dist.get_rank(group):
        if data:
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, group=group)
        return []
    parts = [data]
    for rank, size in enumerate(sizes[1:], start=1):
        buffer = torch.empty(size, dtype=torch.uint8)
        if size:
            dist.recv(buffer, rank, group=group)
        parts.append(buffer.numpy().tobytes())
    return parts


def _gather_sizes(size: int, group: dist.ProcessGroup) -> list[int]:
    """Every rank's number of bytes, in rank order."""
    sizes = torch.zeros(dist.get_world_size(group), 1, dtype=torch.int64)
    dist.all_gather(list(sizes), torch.tensor([size]), group=group)
    counts: list[int] = sizes[:, 0].tolist()
    return counts


def sum_counts(counts: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the sum of an integer tensor on the CPU over all ranks, on every rank."""
    if group is not None:
        dist.all_reduce(counts, group=group)
    return counts
