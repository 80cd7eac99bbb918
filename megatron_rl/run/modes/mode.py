"""The interface of a mode on rank 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.engines.connections import EngineConnections
from megatron_rl.records.run_records import RunRecords
from megatron_rl.run.checkpoints.manager import CheckpointManager
from megatron_rl.run.features.observer import Observers
from megatron_rl.training.dispatcher import Dispatcher
from megatron_rl.training.worker import Worker


@dataclass(frozen=True)
class LoopParts:
    """The parts from which rank 0's loop is made.

    connections: None without engines. worker, checkpoints: None without a model. observers: the
    features of the run. idle: called while rank 0 waits, so that the collectives of the other ranks
    do not time out.
    """

    dispatcher: Dispatcher
    connections: EngineConnections | None
    worker: Worker | None
    records: RunRecords
    checkpoints: CheckpointManager | None
    observers: Observers
    idle: Callable[[], None]


class RankZeroLoop(Protocol):
    """A loop that leads the other ranks to the end of the run."""

    def lead(self) -> None: ...


class Mode(Protocol):
    """A mode on rank 0."""

    def open_leader(self, parts: LoopParts) -> RankZeroLoop:
        """Make the loop of rank 0."""
        ...
