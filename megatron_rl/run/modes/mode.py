"""A mode on rank 0: a function that makes its loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_rl.engines.connections import EngineConnections
from megatron_rl.records.run_records import RunRecords
from megatron_rl.run.checkpoints.manager import CheckpointManager
from megatron_rl.run.features.observer import Observers
from megatron_rl.run.setup import RunSetup
from megatron_rl.training.dispatcher import Dispatcher
from megatron_rl.training.worker import Worker


@dataclass(frozen=True)
class LoopParts:
    """The parts from which rank 0's loop is made.

    connections: None without engines. worker, checkpoints: None without a model. observers: the
    features of the run. idle: called while rank 0 waits, so that the collectives of the other ranks
    do not time out.
    """

    setup: RunSetup
    dispatcher: Dispatcher
    connections: EngineConnections | None
    worker: Worker | None
    records: RunRecords
    checkpoints: CheckpointManager | None
    observers: Observers
    idle: Callable[[], None]


# Leads the other ranks to the end of the run
Lead = Callable[[], None]
# Makes the loop of rank 0
Mode = Callable[[LoopParts], Lead]
