"""The parts that features are made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.schema import Configuration
from megatron_rl.engines.connections import EngineConnections
from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.run.checkpoints.manager import CheckpointManager
from megatron_rl.run.setup import RunSetup
from megatron_rl.training.dispatcher import Dispatcher
from megatron_rl.training.worker import Worker


@dataclass(frozen=True)
class FeatureParts:
    """The parts of one rank.

    worker: None without a model. connections: None without engines, and on other ranks than 0.
    metrics: on rank 0. checkpoints: on rank 0 of a run that trains or records.
    enter: enters a context, which is left at the end of the run.
    """

    setup: RunSetup
    dispatcher: Dispatcher
    worker: Worker | None
    connections: EngineConnections | None
    metrics: MetricsLog | None
    checkpoints: CheckpointManager | None
    enter: Callable[[Any], Any]

    @property
    def configuration(self) -> Configuration:
        """Every key of the run."""
        return self.setup.configuration
