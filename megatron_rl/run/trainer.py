"""A rank's part from Megatron's import on: set up, then lead or follow to the end of the run."""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from megatron_rl.config.schema import Configuration
from megatron_rl.environments.environment import open_environment
from megatron_rl.losses import open_loss
from megatron_rl.mcore import parallel
from megatron_rl.mcore.job import Job
from megatron_rl.models.shape import ModelShape
from megatron_rl.prompts.source import PromptSource
from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.records.progress import Progress
from megatron_rl.records.records import Records
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.run.build import build_leader, build_table, build_worker
from megatron_rl.run.dispatch import Dispatcher
from megatron_rl.run.engines import Connected, Engines
from megatron_rl.run.prompts import build_prompts
from megatron_rl.run.warm_up import warm_up
from megatron_rl.run.watch import Watch
from megatron_rl.sync.sender import Bystander
from megatron_rl.training.worker import Worker


class Trainer:
    """What a rank does beside engines that load, and then with them."""

    def __init__(
        self,
        configuration: Configuration,
        shape: ModelShape,
        job: Job,
        directory: RunDirectory,
        progress: Progress,
        stack: contextlib.ExitStack,
    ) -> None:
        self._configuration = configuration
        self._shape = shape
        self._job = job
        self._directory = directory
        self._progress = progress
        self._stack = stack

    def run(self, engines: Engines, watch: Watch) -> None:
        """To the end of the run."""
        c, progress = self._configuration, self._progress
        prompts = self._build_prompts() if self._job.rank == 0 else None
        worker = self._build_worker()
        connected = self._connect(engines, watch)
        sender = connected.weights if connected is not None else Bystander()
        dispatcher = Dispatcher(self._job.control_group, build_table(worker, engines, sender))
        if connected is None or prompts is None:
            dispatcher.follow()
            return
        progress.say(f"{len(prompts.train)} training prompts, {len(prompts.held_out)} held out; {prompts.excluded}")
        if report := prompts.excluded.report():
            (self._directory.path / "left_out.txt").write_text(report + "\n", encoding="utf-8", errors="replace")
        log = self._stack.enter_context(MetricsLog(self._directory, c.logger))
        records = Records(self._directory, log, progress)
        stops, dp_size = self._shape.eos_token_ids, worker.layout.dp_size
        build_leader(c, stops, dispatcher, connected, records, prompts, dp_size).lead()

    def _build_prompts(self) -> PromptSource:
        self._progress.say("reading prompts")
        with self._progress.during("reading prompts"):
            return build_prompts(self._configuration)

    def _build_worker(self) -> Worker:
        """The model and its stages, and the kernels compiled."""
        c, shape, progress = self._configuration, self._shape, self._progress
        loss, _ = open_loss(c.algo, shape), open_environment(c.environment)  # a user's own may not open
        layout = parallel.initialize(c.parallel, seed=c.seed, job=self._job)
        progress.say("loading the model")
        with progress.during("loading the model"):
            worker = build_worker(c, shape, loss, layout, self._directory.rollouts)
        progress.say("compiling kernels")
        with progress.during("compiling kernels"):
            self._compile(worker)
        return worker

    def _compile(self, worker: Worker) -> None:
        """One rank of each node first: on CPUs the others then read from its cache what it compiled."""
        layout = worker.layout  # who shares the vocabulary or sequences computes in collectives
        together = layout.tp_group is not None or layout.cp_group is not None
        if self._job.local_rank and not together:
            dist.barrier(self._job.control_group)
        warm_up(worker)
        if not self._job.local_rank and not together:
            dist.barrier(self._job.control_group)

    def _connect(self, engines: Engines, watch: Watch) -> Connected | None:
        settings, what = self._configuration.engine, "waiting for the engines"
        if settings.mode == "external":
            what = f"waiting for {', '.join(settings.urls)} (engine.start_timeout_s={settings.start_timeout_s:g})"
        self._progress.say(what)
        with self._progress.during(what):
            connected = engines.connect(self._progress.say)
        watch.look_at(engines.check)
        return connected
