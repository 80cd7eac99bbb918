"""The one way through the ranks: rank 0 says `run(command)`, and every rank executes it through the
same table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch.distributed as dist

from megatron_rl.contracts.commands import Command, Finish
from megatron_rl.training.collectives import broadcast_bytes

_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

Table = Mapping[type[Command], Callable[[Any], Any]]


class Dispatcher:
    """Commands over a CPU process group that spans the world.

    table: what a rank does for each command. Ranks enter a collective only in answer to a command
    that all received.
    """

    def __init__(self, group: dist.ProcessGroup, table: Table) -> None:
        self._group = group
        self._table = table

    def run(self, command: Command) -> Any:
        """Rank 0 only: let every rank execute a command, this one too; returns what it returned
        here.
        """
        self._say(command)
        return self._table[type(command)](command)

    def follow(self) -> None:
        """Every other rank: execute what rank 0 says until the run is complete.

        When rank 0's process ends, its connections close and this raises, whatever it waits in.
        """
        while not isinstance(
            command := _decoder.decode(broadcast_bytes(None, self._group)), Finish
        ):
            self._table[type(command)](command)

    def finish(self) -> None:
        """Rank 0 only: let the others end."""
        self._say(Finish())

    def _say(self, command: Command) -> None:
        broadcast_bytes(msgspec.msgpack.encode(command), self._group)
