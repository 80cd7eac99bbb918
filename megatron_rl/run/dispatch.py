"""The one way through the ranks: rank 0 says `run(command)`, and every rank executes it through the same table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch.distributed as dist

from megatron_rl.contracts.commands import Abort, Command, Finish, Wait
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.training.collectives import broadcast_bytes

_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

Table = Mapping[type[Command], Callable[[Any], Any]]


class RunAborted(Failure):
    """Rank 0 ended the run; it has said why."""

    exit_code = ExitCode.PEER_FAILED


class Dispatcher:
    """Commands over a CPU process group that spans the world.

    table: what a rank does for each command. Ranks enter a collective only in answer to a command that all received.
    """

    def __init__(self, group: dist.ProcessGroup, table: Table) -> None:
        self._group = group
        self._table = table
        self._listening = True

    def run(self, command: Command) -> Any:
        """Rank 0 only: let every rank execute a command, this one too; returns what it returned here."""
        self._say(command)
        self._listening = isinstance(command, Wait)  # the others are in its collectives until it is done here
        result = self._table[type(command)](command)
        self._listening = True
        return result

    def follow(self) -> None:
        """Every other rank: execute what rank 0 says until the run is complete. Raises `RunAborted`."""
        while not isinstance(command := _decoder.decode(broadcast_bytes(None, self._group)), Finish):
            if isinstance(command, Abort):
                raise RunAborted(command.reason)
            self._table[type(command)](command)

    def finish(self) -> None:
        """Rank 0 only: let the others end."""
        self._say(Finish())

    def abort(self, reason: str) -> None:
        """Rank 0 only: end the others if they listen; inside a collective they could not hear it."""
        if self._listening:
            self._listening = False
            self._say(Abort(reason))

    def _say(self, command: Command) -> None:
        broadcast_bytes(msgspec.msgpack.encode(command), self._group)
