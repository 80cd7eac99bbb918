"""Opens what needs Megatron: the model, the connections to the engines and the loop of the rank."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from megatron_rl.contracts.commands import Poll
from megatron_rl.engines.connections import EngineConnections
from megatron_rl.engines.engines import Engines, name_external_engines
from megatron_rl.engines.weight_sync import Sender
from megatron_rl.records.effective_time import open_effective_time
from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.records.progress import Progress
from megatron_rl.records.run_records import RunRecords
from megatron_rl.run.build_worker import open_worker
from megatron_rl.run.checkpoints.disk_space import checkpoint_bytes
from megatron_rl.run.checkpoints.opening import open_checkpoint_manager
from megatron_rl.run.checkpoints.saving import CheckpointWriter
from megatron_rl.run.checkpoints.store import CheckpointStore
from megatron_rl.run.command_table import Export, engine_commands, model_commands
from megatron_rl.run.features.observer import Observers
from megatron_rl.run.features.parts import FeatureParts
from megatron_rl.run.features.registry import open_features
from megatron_rl.run.modes.evaluate import checkpoint_weights, evaluate
from megatron_rl.run.modes.mode import LoopParts, Mode
from megatron_rl.run.modes.profile import open_profile
from megatron_rl.run.modes.train import train
from megatron_rl.run.modes.train_only import train_on_recording
from megatron_rl.run.setup import RunSetup
from megatron_rl.run.supervision.stall_monitor import StallMonitor
from megatron_rl.run.supervision.supervision import Supervision
from megatron_rl.training.activity import Activity
from megatron_rl.training.dispatcher import CommandTable, Dispatcher
from megatron_rl.training.worker import Worker


def open_loop(
    setup: RunSetup, engines: Engines | None, supervision: Supervision
) -> Callable[[], None]:
    """Open the rest of this rank's parts and return its loop (a collective).

    engines: None when the run trains on recorded rollouts.
    """
    job = setup.job
    mode = _open_mode(setup) if job.rank == 0 else None
    worker, connections = _open_worker_and_connections(setup, engines, supervision)
    activity = Activity()
    if job.world_size > 1:
        log = setup.progress.log
        monitor = StallMonitor(job.rank, job.world_size, activity, job.store(), log)
        supervision.parts.enter(monitor)
    dispatcher = Dispatcher(
        job.control_group,
        _command_table(setup, engines, connections, worker, supervision),
        activity,
    )
    if worker is not None:
        supervision.stop.accept_signals()
    records = None if job.rank else _open_records(setup, supervision)
    checkpoints = None
    if records is not None and worker is not None:
        checkpoints = open_checkpoint_manager(setup, worker, dispatcher, supervision.stop)
    observers = Observers(
        open_features(
            FeatureParts(
                setup=setup,
                dispatcher=dispatcher,
                worker=worker,
                connections=connections,
                metrics=None if records is None else records.metrics,
                checkpoints=checkpoints,
                enter=supervision.parts.enter,
            )
        )
    )
    dispatcher.extend(observers.handlers(), observers.around)
    if mode is None or records is None:
        return dispatcher.follow
    parts = LoopParts(
        setup=setup,
        dispatcher=dispatcher,
        connections=connections,
        worker=worker,
        records=records,
        checkpoints=checkpoints,
        observers=observers,
        idle=partial(_poll, dispatcher, setup.progress, connections),
    )
    return mode(parts)


def _open_mode(setup: RunSetup) -> Mode:
    """Open the mode. Rank 0 only. Raises `PromptDataError`."""
    match setup.configuration.mode:
        case "eval":
            return evaluate
        case "profile":
            return open_profile(setup)
        case "train_only":
            return train_on_recording
        case _:
            return train


def _poll(
    dispatcher: Dispatcher, progress: Progress, connections: EngineConnections | None
) -> None:
    """Keep the other ranks waiting, and let engines join and leave meanwhile."""
    with progress.task("waiting for the other ranks"):
        dispatcher.run(Poll())
    if connections is not None:
        connections.recover(dispatcher.run)


def _connect(
    setup: RunSetup, engines: Engines, supervision: Supervision
) -> EngineConnections | None:
    """Wait for the engines; rank 0 is connected to them."""
    settings = setup.configuration.engine
    task = "waiting for the engines"
    if settings.mode == "external":
        names = name_external_engines(settings)
        task = f"waiting for {names} (engine.start_timeout_s={settings.start_timeout_s:g})"
    setup.progress.log(task)
    is_measurement = setup.configuration.is_measurement
    sends_weights = not is_measurement or setup.resume_point.checkpoint is not None
    with setup.progress.task(task):
        connections = engines.connect(setup.progress.log, sends_weights=sends_weights)
    supervision.watchdog.add_check(engines.check)
    return connections


def _open_worker_and_connections(
    setup: RunSetup, engines: Engines | None, supervision: Supervision
) -> tuple[Worker | None, EngineConnections | None]:
    """Open the model, and connect to the engines, which load meanwhile.

    Colocated engines load and sleep first: they take memory for that which the model needs.
    """
    c = setup.configuration
    worker = None
    connections = None
    if engines is not None and c.engine.colocated:
        connections = _connect(setup, engines, supervision)
        _let_sleep(connections, setup)
    if not c.is_measurement:
        worker = open_worker(setup, supervision.parts)
    if engines is not None and not c.engine.colocated:
        connections = _connect(setup, engines, supervision)
    return worker, connections


def _let_sleep(connections: EngineConnections | None, setup: RunSetup) -> None:
    """Let the engines sleep until the first sync (a collective)."""
    if connections is not None:
        with setup.progress.task("letting the engines sleep"):
            connections.weights.sleep()
    dist.barrier(group=setup.job.control_group)


def _command_table(
    setup: RunSetup,
    engines: Engines | None,
    connections: EngineConnections | None,
    worker: Worker | None,
    supervision: Supervision,
) -> CommandTable:
    """Return the handlers of the parts that this rank has."""
    table: CommandTable = {}
    if engines is not None:
        sender = _open_sender(setup, engines, connections)
        export = _open_export(setup, worker)
        table = engine_commands(engines, sender, export, supervision.stop, setup.job)
    if worker is not None:
        table = {**table, **model_commands(worker, _open_writer(setup, worker))}
    return table


def _open_sender(
    setup: RunSetup, engines: Engines, connections: EngineConnections | None
) -> Sender:
    """Return this rank's side of weight syncs. Rank 0 leads."""
    if connections is None:
        return engines.open_follower(setup.progress.log)
    return connections.weights


def _open_export(setup: RunSetup, worker: Worker | None) -> Export | None:
    """Return the source of the weights that engines are sent; None when they hold them already."""
    if worker is not None:
        return worker.export
    if setup.resume_point.checkpoint is None:
        return None
    return checkpoint_weights(
        setup.configuration, setup.shape, setup.resume_point.checkpoint, setup.job
    )


def _open_writer(setup: RunSetup, worker: Worker) -> CheckpointWriter:
    """Open this rank's part in writing checkpoints (a collective)."""
    c = setup.configuration
    background = None
    if c.run.checkpoint_every and c.run.background_saves:
        timeout = timedelta(seconds=c.parallel.timeout_s)
        background = dist.new_group(backend="gloo", timeout=timeout)
    store = CheckpointStore(setup.directory.checkpoints)
    return CheckpointWriter(
        worker,
        store,
        nbytes=checkpoint_bytes(c, setup.shape),
        keep=c.run.keep_checkpoints,
        background=background,
        node=setup.job.node,
        writes_rollouts=setup.job.local_rank == 0,
    )


def _open_records(setup: RunSetup, supervision: Supervision) -> RunRecords:
    effective_time = None
    if not setup.configuration.is_measurement:
        effective_time = open_effective_time(setup.directory.path)
    metrics = MetricsLog(setup.directory, effective_time)
    return RunRecords(setup.directory, supervision.parts.enter(metrics), setup.progress)
