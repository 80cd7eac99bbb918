"""Everything one rank holds during a run, opened in order and closed in reverse. Engines come
before Megatron's import.

The order is that of the seconds: torch takes two to import, an engine twenty to start, Megatron
five to import.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron_rl.config.curriculum import sized_for_all_phases
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.engines.engines import Engines, open_engines
from megatron_rl.mcore.job import Job, join, leave
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.prompts.selection.transferred_beliefs import TransferredBeliefs
from megatron_rl.records.progress import Progress, print_line
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.records.run_lock import mark_run_alive
from megatron_rl.run.checkpoints.belief_transfer import read_transferred_beliefs
from megatron_rl.run.checkpoints.disk_space import require_disk_space
from megatron_rl.run.checkpoints.resume import ResumePoint, find_resume_point, open_run_directory
from megatron_rl.run.checkpoints.resumed_directory import claim_directory
from megatron_rl.run.supervision.exit_reporter import ExitReporter
from megatron_rl.run.supervision.stop_request import StopRequest
from megatron_rl.run.supervision.watchdog import Watchdog
from megatron_rl.training.collectives import broadcast_bytes


class RunDirectoryMissing(Failure):
    """Rank 0 could not make the run directory, and says why."""

    exit_code = ExitCode.PEER_FAILED


class Rank:
    """One rank of one run.

    Rank 0 leads; local rank 0 of every node runs the node's engines; the others follow.
    """

    def __init__(
        self,
        configuration: Configuration,
        progress: Progress,
        words: ExitReporter,
        watch: Watchdog,
        stop: StopRequest | None = None,
    ) -> None:
        self._configuration = configuration
        self._progress = progress
        self._words = words
        self._watch = watch
        self._stop = stop
        self._stack = contextlib.ExitStack()
        self._engines: Engines | None = None
        self._beliefs: TransferredBeliefs | None = None

    def run(self) -> None:
        """Set up, then lead or follow to the end."""
        c, progress = self._configuration, self._progress
        shape = read_shape(c.model.path)
        job = join(c.parallel)
        self._stack.callback(leave)
        start = self.find_resume_point(job)
        directory = self._open_directory(job, shape, start)
        start = replace(start, beliefs=self._beliefs)
        progress.log(
            f"{job.world_size} rank(s) on {job.num_nodes} node(s); run directory {directory.path}"
        )
        self.tell(start)
        if c.mode != "train_only":
            self._engines = self._stack.enter_context(
                open_engines(sized_for_all_phases(c), shape, job, directory)
            )
            progress.log(f"{self._engines.description}; importing Megatron meanwhile")
        with progress.task("importing Megatron"):
            from megatron_rl.mcore import compat

            compat.install()
            from megatron_rl.run.trainer import (
                Trainer,  # Megatron may only be imported after the line above
            )
        trainer = Trainer(c, shape, job, directory, progress, self._stack, start, self._stop)
        trainer.run(self._engines, self._watch)
        if job.rank == 0:
            print_line(f"done: metrics, logs and checkpoints are in {directory.path}")

    def close(self) -> None:
        """After a run that is complete: leave the engines' groups, end this rank's processes, leave
        the job.
        """
        self._stack.close()

    def kill_processes(self) -> None:
        """After one that failed: end this rank's processes first, so that nothing below waits for
        them.

        Other ranks notice the end of this process; a message could not reach one that is inside a
        collective.
        """
        if self._engines is not None:
            self._engines.kill_processes()
        self._stack.close()

    def tell(self, start: ResumePoint) -> None:
        """What a person should know of the beginning."""
        run = self._configuration.run
        if run.resume == "auto" and not run.checkpoint_every:
            self._progress.log(
                "warning: run.resume=auto goes on from checkpoints, and run.checkpoint_every=0 saves none: what "
                "this run trains is lost when it is stopped"
            )
        for damaged in start.damaged_checkpoints:
            self._progress.log(f"warning: a damaged checkpoint is passed over: {damaged}")
        for warning in start.beliefs.warnings if start.beliefs is not None else ():
            self._progress.log(f"warning: {warning}")
        if start.state is not None:
            self._progress.log(f"going on after step {start.state.step}, from {start.checkpoint}")
        for change in start.changed_settings(self._configuration):
            self._progress.log(f"not as it was when the checkpoint was saved: {change}")

    def find_resume_point(self, job: Job) -> ResumePoint:
        """Where the run begins; looked for once no process of it lives, which could still prune
        what is found.

        Raises `RunDirectoryTaken` (rank 0) and `NoCompleteCheckpoint`.
        """

        def wait() -> str:
            if (claimed := claim_directory(self._configuration)) is not None:
                self._stack.enter_context(claimed)
            return "free"

        if self._configuration.run.resume == "auto":
            with self._progress.task("waiting for the processes of the run before to end"):
                _led(job, wait)
        with self._progress.task("comparing the checkpoint with its hashes"):
            return find_resume_point(self._configuration, job)

    def _open_directory(self, job: Job, shape: ModelShape, start: ResumePoint) -> RunDirectory:
        """Rank 0 names and makes it; the others learn where it is. All of them mark the run as
        alive.

        Raises `RunDirectoryTaken`, `NotEnoughDiskSpace`, `BeliefsUnavailable` and
        `CheckpointOfOtherRun` (rank 0).
        """

        def open_it() -> str:
            start.changed_settings(self._configuration)
            require_disk_space(self._configuration, shape)
            self._beliefs = read_transferred_beliefs(self._configuration, start.state)
            return str(open_run_directory(self._configuration, start, ranks=job.world_size).path)

        where = Path(_led(job, open_it))
        self._words.directory = where
        with contextlib.suppress(OSError):  # a file system without locks
            self._stack.enter_context(mark_run_alive(where))
        return RunDirectory(where)


def _led(job: Job, action: Callable[[], str]) -> str:
    """Rank 0 acts, and all learn what it says (a collective).

    Raises `RunDirectoryMissing` on the others where it failed.
    """
    said = ""
    if job.rank == 0:
        try:
            said = action()
        finally:
            broadcast_bytes(said.encode(), job.control_group)
        return said
    said = broadcast_bytes(None, job.control_group).decode()
    if not said:
        raise RunDirectoryMissing("rank 0 could not make the run directory")
    return said
