"""Opens rank 0's part in saving checkpoints."""

from __future__ import annotations

from megatron_rl.config.evaluations import best_metric
from megatron_rl.records.run_directory import STOP_FILE
from megatron_rl.run.checkpoints.best import BestCheckpoint
from megatron_rl.run.checkpoints.manager import CheckpointManager
from megatron_rl.run.checkpoints.resume import flat_configuration
from megatron_rl.run.checkpoints.store import CheckpointStore
from megatron_rl.run.setup import RunSetup
from megatron_rl.run.supervision.stop_request import StopRequest
from megatron_rl.training.dispatcher import Dispatcher
from megatron_rl.training.worker import Worker


def open_checkpoint_manager(
    setup: RunSetup, worker: Worker, dispatcher: Dispatcher, stop: StopRequest
) -> CheckpointManager:
    """Make the checkpoint manager of a run that trains or records."""
    c = setup.configuration
    optimizer = worker.optimizer
    state = setup.resume_point.state
    step = None if state is None else state.step
    is_continued = c.run.resume == "auto"
    if c.run.checkpoint_every:
        stop.watch_file(setup.directory.path / STOP_FILE)
    return CheckpointManager(
        settings=c.run,
        configuration=flat_configuration(c),
        world_size=worker.layout.world_size,
        optimizer_steps=lambda: optimizer.steps,
        dispatcher=dispatcher,
        progress=setup.progress,
        stop=stop,
        last_saved_step=step if is_continued else None,
        start_step=None if is_continued else step,
        reference=setup.reference_digest,
        best=_best_checkpoint(setup),
    )


def _best_checkpoint(setup: RunSetup) -> BestCheckpoint | None:
    """Follow the best evaluation, from the checkpoint's best one if the run continues."""
    run = setup.configuration.run
    if run.keep_best is None:
        return None
    state = setup.resume_point.state
    best = None if state is None or run.resume != "auto" else state.best
    store = CheckpointStore(setup.directory.checkpoints)
    return BestCheckpoint(best_metric(run.keep_best), store, best)
