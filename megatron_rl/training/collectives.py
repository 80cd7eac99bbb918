"""The control loop's channel: rank 0 decides, every rank hears the same command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import torch
import torch.distributed as dist

from megatron_rl.contracts.commands import Abort, Command

_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


class ControlChannel:
    """Broadcasts commands from rank 0 over a CPU process group that spans the world."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._listening = False

    def send(self, command: Command) -> None:
        """Rank 0 only: tell every rank something that needs no collective."""
        broadcast_bytes(msgspec.msgpack.encode(command), self._group)
        self._listening = True

    @contextlib.contextmanager
    def ordered(self, command: Command) -> Iterator[None]:
        """Rank 0 only: give an order and carry it out with the others in the block; after it they listen again."""
        self.send(command)
        self._listening = False
        yield
        self._listening = True

    def abort(self, reason: str) -> None:
        """Rank 0 only: end the others if they listen; inside a collective they could not hear it."""
        if self._listening:
            self._listening = False
            broadcast_bytes(msgspec.msgpack.encode(Abort(reason)), self._group)

    def receive(self) -> Command:
        """Other ranks: wait for the next command."""
        return _decoder.decode(broadcast_bytes(None, self._group))


def broadcast_bytes(data: bytes | None, group: dist.ProcessGroup) -> bytes:
    """Broadcast bytes from rank 0 (which passes them; the others pass None) and return them everywhere."""
    size = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64)
    dist.broadcast(size, 0, group=group)
    if data is not None:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    else:
        buffer = torch.empty(int(size), dtype=torch.uint8)
    if len(buffer):
        dist.broadcast(buffer, 0, group=group)
    return buffer.numpy().tobytes()


def gather_bytes(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Every rank's bytes, in rank order, on every rank."""
    world = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(parts, padded, group=group)
    return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]
