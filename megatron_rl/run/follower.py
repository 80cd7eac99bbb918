"""The loop of every rank but 0: wait for a command, do it with everyone else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from megatron_rl.contracts.commands import Abort, Finish, SaveWeights, Sync, Train, Wait
from megatron_rl.training.collectives import ControlChannel
from megatron_rl.training.worker import Worker


class RunAborted(RuntimeError):
    """Rank 0 ended the run; it has said why."""


def follow(
    control: ControlChannel,
    worker: Worker,
    *,
    export_dtype: torch.dtype,
    check_services: Callable[[], None],
) -> None:
    """Obey rank 0 until the run is complete. Raises `RunAborted` when rank 0 gives up."""
    while True:
        match control.receive():
            case Wait():
                check_services()
            case Sync():
                for _ in worker.export(export_dtype):
                    pass
            case Train(plan):
                worker.train(plan)
            case SaveWeights(path):
                worker.save(Path(path))
            case Abort(reason):
                raise RunAborted(reason)
            case Finish():
                return
