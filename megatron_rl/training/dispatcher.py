"""Commands from rank 0 to all ranks.

Rank 0 calls `run(command)`, and every rank executes the command through the same command table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch.distributed as dist

from megatron_rl.contracts.commands import Command, Finish, Train
from megatron_rl.mcore.collectives import broadcast_bytes
from megatron_rl.training.activity import Activity

_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

CommandTable = Mapping[type[Command], Callable[[Any], Any]]
Around = Callable[[Command], contextlib.AbstractContextManager[None]]


class Dispatcher:
    """Sends commands over a CPU process group of all ranks.

    Ranks enter a collective only to execute a command that all of them received.

    table: the function that a rank calls for each command. activity: holds the command while it
    runs.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        table: CommandTable,
        activity: Activity | None = None,
    ) -> None:
        self._group = group
        self._table = table
        self._activity = activity or Activity()
        self._around: Around = _around_nothing

    def extend(self, table: CommandTable, around: Around) -> None:
        """Execute more commands, and each command of this rank within `around`."""
        self._table = {**self._table, **table}
        self._around = around

    def run(self, command: Command) -> Any:
        """Let every rank execute a command and return this rank's result. Rank 0 only."""
        with self._activity.command(_describe(command)), self._around(command):
            self._broadcast(command)
            return self._table[type(command)](command)

    def follow(self) -> None:
        """Execute the commands of rank 0 until the run is complete. All ranks but rank 0.

        Raises when rank 0's process ends, because its connections close.
        """
        while True:
            command = _decoder.decode(broadcast_bytes(None, self._group))
            if isinstance(command, Finish):
                return
            with self._activity.command(_describe(command)), self._around(command):
                self._table[type(command)](command)

    def finish(self) -> None:
        """End `follow` on the other ranks. Rank 0 only."""
        self._broadcast(Finish())

    def _broadcast(self, command: Command) -> None:
        broadcast_bytes(msgspec.msgpack.encode(command), self._group)


def _describe(command: Command) -> str:
    """Name a command for people."""
    name = type(command).__name__
    return f"{name}, step {command.plan.step}" if isinstance(command, Train) else name


def _around_nothing(command: Command) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()
