"""Everything one rank holds during a run, opened in order and closed in reverse."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from pathlib import Path

from megatron_rl.config.schema import Configuration
from megatron_rl.environments.environment import open_environment
from megatron_rl.losses import open_loss
from megatron_rl.mcore import parallel
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.models.qwen3_moe import read_shape
from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.records.progress import Progress
from megatron_rl.records.records import Records
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.run.build import build_leader, build_prompts, build_table, build_worker
from megatron_rl.run.dispatch import Dispatcher, RunAborted
from megatron_rl.run.engines import Engines, open_engines
from megatron_rl.run.failures import comes_from_engines
from megatron_rl.sync.sender import Bystander
from megatron_rl.training.collectives import broadcast_bytes

_DEATH_SECONDS = 3.0


class Rank:
    """One rank of one run. Rank 0 leads; local rank 0 of every node runs the node's engines; the others follow."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._stack = contextlib.ExitStack()
        self._directory: RunDirectory | None = None
        self._engines: Engines | None = None
        self._dispatcher: Dispatcher | None = None
        self.speaks = int(os.environ.get("RANK", "0")) == 0

    def run(self) -> None:
        """Set up, then lead or follow to the end."""
        c = self._configuration
        shape = read_shape(c.model.path)
        loss, _ = open_loss(c.algo, shape), open_environment(c.environment)  # a user's own may not open
        layout = parallel.initialize(c.parallel, seed=c.seed)
        self._stack.callback(parallel.shutdown)
        directory = self._open_directory(layout)
        progress = Progress(c.train.total_steps, enabled=c.logger.progress and layout.rank == 0)
        progress.say(f"{layout.world_size} rank(s) on {layout.num_nodes} node(s); run directory {directory.path}")
        prompts = build_prompts(c) if layout.rank == 0 else None  # bad rows are found before engines start
        engines = self._engines = self._stack.enter_context(open_engines(c, shape, layout, directory))
        worker = build_worker(c, shape, loss, layout, directory.rollouts)
        connected = engines.connect()
        sender = connected.weights if connected is not None else Bystander()
        dispatcher = Dispatcher(layout.control_group, build_table(worker, engines, sender))
        if connected is None or prompts is None:
            dispatcher.follow()
            return
        self._dispatcher = dispatcher
        progress.say(f"{len(prompts.train)} training prompts, {len(prompts.held_out)} held out; {prompts.excluded}")
        log = self._stack.enter_context(MetricsLog(directory, c.logger))
        records = Records(directory, log, progress)
        build_leader(c, shape.eos_token_ids, dispatcher, connected, records, prompts, layout.dp_size).lead()
        print(f"done: metrics, logs and checkpoints are in {directory.path}", flush=True)

    def better_reason(self, error: BaseException) -> BaseException:
        """The death of an engine explains what failed because of it, but is noticed a moment later."""
        deadline = time.monotonic() + _DEATH_SECONDS
        while self._engines is not None and comes_from_engines(error) and time.monotonic() < deadline:
            try:
                self._engines.check()
            except Exception as death:
                return death
            time.sleep(0.2)
        return error

    def abort(self, reason: str) -> None:
        """Rank 0: tell followers that listen; torchrun ends the others."""
        if self._dispatcher is not None:
            with contextlib.suppress(RuntimeError):
                self._dispatcher.abort(reason)

    def close(self) -> None:
        """Leave the engines' groups, end this rank's processes, leave the job."""
        self._stack.close()

    def report(self, code: int, reason: str) -> None:
        """Rank 0: leave the code and the reason in the run directory."""
        if self._directory is not None:
            self._directory.write_exit(int(code), reason)

    def _open_directory(self, layout: RankLayout) -> RunDirectory:
        """Rank 0 names and makes it; the others learn where it is. Raises `RunDirectoryTaken` (rank 0)."""
        if layout.rank == 0:
            try:
                self._directory = RunDirectory.create(self._configuration, datetime.datetime.now())
            finally:
                created = str(self._directory.path) if self._directory is not None else ""
                broadcast_bytes(created.encode(), layout.control_group)
            return self._directory
        where = broadcast_bytes(None, layout.control_group).decode()
        if not where:
            raise RunAborted("rank 0 could not make the run directory")
        return RunDirectory(Path(where))
