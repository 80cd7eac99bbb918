"""A rank's part from Megatron's import on: set up, then lead or follow to the end of the run."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl.config.schema import Configuration
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
from megatron_rl.engines.engines import EngineConnections, Engines
from megatron_rl.engines.weight_sync import FollowerSync
from megatron_rl.environments.environment import open_environment
from megatron_rl.losses import open_loss
from megatron_rl.mcore import parallel
from megatron_rl.mcore.job import Job
from megatron_rl.models.shape import ModelShape
from megatron_rl.prompts.source import PromptSource
from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.records.progress import Progress
from megatron_rl.records.records import Records
from megatron_rl.records.run_directory import STOP_FILE, RunDirectory
from megatron_rl.rollouts.evaluation import Evaluation
from megatron_rl.run.build import build_leader, build_table, build_worker
from megatron_rl.run.checkpoints.disk_space import checkpoint_bytes
from megatron_rl.run.checkpoints.manager import CheckpointManager
from megatron_rl.run.checkpoints.resume import ResumePoint, settings_of
from megatron_rl.run.checkpoints.saving import CheckpointWriter
from megatron_rl.run.checkpoints.store import CheckpointStore
from megatron_rl.run.leader import Leader
from megatron_rl.run.modes.evaluate import EvaluationRun, open_weights
from megatron_rl.run.modes.profile import PassRateProfile, open_rates
from megatron_rl.run.modes.record import record_rollouts, train_only_leader
from megatron_rl.run.prompts import build_prompts, build_sets
from megatron_rl.run.supervision.stop_request import StopRequest
from megatron_rl.run.supervision.watchdog import Watchdog
from megatron_rl.training.dispatcher import Dispatcher
from megatron_rl.training.warm_up import warm_up
from megatron_rl.training.worker import Worker


class Trainer:
    """What a rank does beside engines that load, and then with them.

    start: what the run goes on from. stop: None where nothing is saved.
    """

    def __init__(
        self,
        configuration: Configuration,
        shape: ModelShape,
        job: Job,
        directory: RunDirectory,
        progress: Progress,
        stack: contextlib.ExitStack,
        start: ResumePoint,
        stop: StopRequest | None,
    ) -> None:
        self._configuration = configuration
        self._shape = shape
        self._job = job
        self._directory = directory
        self._progress = progress
        self._stack = stack
        self._start = start
        self._stop = stop or StopRequest(configuration.run.stop_within_s)

    def run(self, engines: Engines | None, watch: Watchdog) -> None:
        """To the end of the run. engines None: rollouts are recorded ones."""
        if engines is None:
            self._train_only()
            return
        if self._configuration.mode in ("eval", "profile"):
            self._measure(engines, watch)
            return
        c, progress = self._configuration, self._progress
        prompts = self._build_prompts() if self._job.rank == 0 else None
        worker = self._build_worker()
        connected = self._connect(engines, watch)
        sender = connected.weights if connected is not None else FollowerSync()
        table = {**build_table(c, worker, engines, sender), **self._keeping(worker)}
        table[Poll] = lambda command: self._wait(engines)
        dispatcher = Dispatcher(self._job.control_group, table)
        self._stop.accept()
        if connected is None or prompts is None:
            dispatcher.follow()
            return
        counts = f"{len(prompts.train)} training prompts, {len(prompts.held_out)} held out"
        progress.say("; ".join(filter(None, (counts, *prompts.told()))))
        if report := prompts.excluded.report():
            (self._directory.path / "left_out.txt").write_text(
                report + "\n", encoding="utf-8", errors="replace"
            )
        stops, dp_size = self._shape.eos_token_ids, worker.layout.dp_size
        leader = build_leader(c, stops, dispatcher, connected, self._records(), prompts, dp_size)
        self._lead(leader, worker)

    def _lead(self, leader: Leader, worker: Worker) -> None:
        """From where the run goes on to its end."""
        c, start = self._configuration, self._start
        saved = start.state.step if start.state is not None and c.run.resume == "auto" else None
        leader.keeper = CheckpointManager(
            settings=c.run,
            facts=settings_of(c),
            world_size=worker.layout.world_size,
            optimizer_steps=lambda: worker.optimizer.steps,
            dispatcher=leader.dispatcher,
            progress=self._progress,
            stop=self._stop,
            request=self._directory.path / STOP_FILE,
            saved=saved,
        )
        if start.state is not None:
            leader.resume_from(start.state.position)
        leader.lead()

    def _records(self) -> Records:
        state = self._start.state
        first = (
            None
            if state is None or self._configuration.mode in ("eval", "profile")
            else state.step + 1
        )
        log = MetricsLog(self._directory, self._configuration.logger, first)
        return Records(self._directory, self._stack.enter_context(log), self._progress)

    def _keeping(self, worker: Worker) -> dict[type[Command], Callable[[Any], Any]]:
        """What every rank does for the commands that keep something."""
        run, shape = self._configuration.run, self._shape
        nbytes = checkpoint_bytes(self._configuration, shape)
        background = None
        if run.checkpoint_every and run.background_saves:
            background = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=self._configuration.parallel.timeout_s)
            )
        shelf, keep = CheckpointStore(self._directory.checkpoints), run.keep_checkpoints
        checkpoints = CheckpointWriter(
            worker, shelf, nbytes=nbytes, keep=keep, background=background
        )
        return {
            Checkpoint: checkpoints.save,
            WaitForSave: checkpoints.settle,
            Record: lambda command: record_rollouts(command, self._job),
        }

    def _train_only(self) -> None:
        """On recorded rollouts, with no engine."""
        c, worker = self._configuration, self._build_worker()
        table = self._keeping(worker)
        table[Train] = lambda command: worker.train(command.plan)
        table[Save] = lambda command: worker.save(Path(command.path))
        dispatcher = Dispatcher(self._job.control_group, table)
        self._stop.accept()
        if self._job.rank:
            dispatcher.follow()
            return
        dp_size = worker.layout.dp_size
        self._lead(
            train_only_leader(c, self._shape, self._job, dispatcher, self._records(), dp_size),
            worker,
        )

    def _measure(self, engines: Engines, watch: Watchdog) -> None:
        """What engines answer; weights of a checkpoint are read by rank 0 alone, and no model is in
        memory.
        """
        c, checkpoint = self._configuration, self._start.checkpoint
        sets = build_sets(c) if self._job.rank == 0 else {}
        rates = open_rates(c) if self._job.rank == 0 and c.mode == "profile" else None
        connected = self._connect(engines, watch)
        table: dict[type[Command], Callable[[Any], Any]] = {Poll: lambda command: engines.check()}
        if checkpoint is not None:
            weights = open_weights(c, self._shape, checkpoint, self._job)
            sender = connected.weights if connected is not None else FollowerSync()
            table[Sync] = lambda command: sender.send(
                command, weights() if self._job.rank == 0 else iter(())
            )
        dispatcher = Dispatcher(self._job.control_group, table)
        if connected is None:
            dispatcher.follow()
            return
        idle, stops = partial(dispatcher.run, Poll()), self._shape.eos_token_ids
        evaluations = {
            name: Evaluation(connected.queue, prompts, c.eval, c.rollout, stops, idle)
            for name, prompts in sets.items()
        }
        sync = connected.weights if checkpoint is not None else None
        rest = (sync, dispatcher, connected.queue, self._records())
        (
            EvaluationRun(evaluations, *rest)
            if rates is None
            else PassRateProfile(evaluations["train"], rates, *rest)
        ).lead()

    def _build_prompts(self) -> PromptSource:
        self._progress.say("reading prompts")
        with self._progress.during("reading prompts"):
            return build_prompts(self._configuration, self._start.beliefs)

    def _build_worker(self) -> Worker:
        """The model and its stages, and the kernels compiled."""
        c, shape, progress = self._configuration, self._shape, self._progress
        loss, _ = (
            open_loss(c.algo, shape),
            open_environment(c.environment),
        )  # a user's own may not open
        layout = parallel.initialize(c.parallel, seed=c.seed, job=self._job)
        progress.say("loading the model")
        with progress.during("loading the model"):
            worker = build_worker(c, shape, loss, layout, self._directory.rollouts)
        with progress.during("loading the checkpoint"):
            fresh = self._start.load(worker)
        if fresh:
            progress.say(fresh)
        progress.say("compiling kernels")
        with progress.during("compiling kernels"):
            self._compile(worker)
        # modules and model stay to the end: to search them takes 5 % of a rank's time on a CPU
        gc.freeze()
        self._stack.callback(gc.unfreeze)  # or libraries report all that they still hold as leaked
        return worker

    def _compile(self, worker: Worker) -> None:
        """One rank of each node first: on CPUs the others then read from its cache what it
        compiled.
        """
        layout = worker.layout  # who shares the vocabulary or sequences computes in collectives
        together = layout.tp_group is not None or layout.cp_group is not None
        if self._job.local_rank and not together:
            dist.barrier(self._job.control_group)
        warm_up(worker)
        if not self._job.local_rank and not together:
            dist.barrier(self._job.control_group)

    def _wait(self, engines: Engines) -> None:
        engines.check()
        self._stop.check_time()

    def _connect(self, engines: Engines, watch: Watchdog) -> EngineConnections | None:
        settings, what = self._configuration.engine, "waiting for the engines"
        if settings.mode == "external":
            what = f"waiting for {', '.join(settings.urls)} (engine.start_timeout_s={settings.start_timeout_s:g})"
        self._progress.say(what)
        with self._progress.during(what):
            connected = engines.connect(self._progress.say)
        watch.look_at(engines.check)
        return connected
