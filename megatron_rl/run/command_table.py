"""The table of commands that the core of a run needs. Features add their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.contracts.commands import (
    Checkpoint,
    Command,
    Poll,
    Record,
    Save,
    Sync,
    Train,
    WaitForSave,
)
from megatron_rl.engines.engines import Engines
from megatron_rl.engines.weight_sync import Sender
from megatron_rl.mcore.job import Job
from megatron_rl.run.checkpoints.saving import CheckpointWriter
from megatron_rl.run.modes.record import record_rollouts
from megatron_rl.run.supervision.stop_request import StopRequest
from megatron_rl.training.dispatcher import CommandTable as Table
from megatron_rl.training.exchange.rollout_exchange import RolloutsLost
from megatron_rl.training.worker import LostRollouts, TrainOutcome, Worker
from sglang_bridge.weights.source import WeightSource

Export = Callable[[], WeightSource]


@dataclass(frozen=True)
class EngineCommands:
    """Commands about the engines.

    sender: this rank's side of a weight sync. export: the weights to send; None where the engines
    already hold them. stop: aborts a step that waits for rollouts once a stop was requested.
    """

    engines: Engines
    sender: Sender
    export: Export | None
    stop: StopRequest
    job: Job

    def table(self) -> Table:
        """Return the handlers of `Poll`, `Record` and, with weights to send, `Sync`."""
        handlers: dict[type[Command], Callable[[Any], Any]] = {
            Poll: self.poll,
            Record: self.record,
        }
        if self.export is not None:
            handlers[Sync] = self.sync
        return handlers

    def poll(self, command: Poll) -> None:
        """Check the engines of this node. Raises what ended them, or `WaitAborted`."""
        self.engines.check()
        self.stop.check_deadline()

    def sync(self, command: Sync) -> dict[str, float]:
        """Send the weights to the engines (a collective); returns metrics."""
        assert self.export is not None
        return self.sender.send(command, self.export())

    def record(self, command: Record) -> list[str] | LostRollouts:
        """Write the rollouts of this node (a collective). Nothing is written if some are gone."""
        return record_rollouts(command, self.job)


@dataclass(frozen=True)
class ModelCommands:
    """Commands about the model: training, weights and checkpoints."""

    worker: Worker
    checkpoints: CheckpointWriter

    def table(self) -> Table:
        """Return the handlers of the commands that need a model."""
        return {
            Train: self.train,
            Save: lambda command: self.worker.save(Path(command.path)),
            Checkpoint: self.checkpoints.save,
            WaitForSave: self.checkpoints.wait_for_save,
        }

    def train(self, command: Train) -> TrainOutcome | LostRollouts:
        """Train one step (a collective). No rank trains if rollouts are gone."""
        try:
            return self.worker.train(
                command.plan,
                keep_values=command.keep_values,
                max_norm=command.max_norm,
                check_weights=command.check_weights,
                version=command.version,
            )
        except RolloutsLost as error:  # on every rank
            return LostRollouts(error.rollout_ids)


def command_table(engines: EngineCommands | None, model: ModelCommands | None) -> Table:
    """Combine the handlers of the parts that this rank has."""
    table = {} if engines is None else dict(engines.table())
    return table if model is None else table | dict(model.table())
