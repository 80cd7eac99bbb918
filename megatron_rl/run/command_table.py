"""The table of commands that the core of a run needs. Features add their own."""

from __future__ import annotations

from collections.abc import Callable
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


def engine_commands(
    engines: Engines, sender: Sender, export: Export | None, stop: StopRequest, job: Job
) -> Table:
    """Return the handlers of `Poll`, `Record` and, with weights to send, `Sync`.

    sender: this rank's side of a weight sync. export: the weights to send; None where the engines
    already hold them. stop: aborts a step that waits for rollouts once a stop was requested.
    """

    def poll(command: Poll) -> None:
        """Check the engines of this node. Raises what ended them, or `WaitAborted`."""
        engines.check()
        stop.check_deadline()

    table: dict[type[Command], Callable[[Any], Any]] = {
        Poll: poll,
        Record: lambda command: record_rollouts(command, job),
    }
    if export is not None:
        table[Sync] = lambda command: sender.send(command, export())
    return table


def model_commands(worker: Worker, checkpoints: CheckpointWriter) -> Table:
    """Return the handlers of the commands about the model: training, weights and checkpoints."""

    def train(command: Train) -> TrainOutcome | LostRollouts:
        """Train one step (a collective). No rank trains if rollouts are gone."""
        try:
            return worker.train(
                command.plan,
                keep_values=command.keep_values,
                max_norm=command.max_norm,
                check_weights=command.check_weights,
                version=command.version,
            )
        except RolloutsLost as error:  # on every rank
            return LostRollouts(error.rollout_ids)

    return {
        Train: train,
        Save: lambda command: worker.save(Path(command.path)),
        Checkpoint: checkpoints.save,
        WaitForSave: checkpoints.wait_for_save,
    }
