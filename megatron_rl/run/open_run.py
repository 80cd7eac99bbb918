"""Opens the parts of one rank in order, up to the loop that the rank runs.

Engines take the longest to load. They are started first, and Megatron is imported meanwhile.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_rl.config.curriculum import sized_for_all_phases
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.engines.engines import Engines, open_engines
from megatron_rl.mcore.job import Job, join, leave
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.prompts.selection.transferred_beliefs import TransferredBeliefs
from megatron_rl.records.progress import Progress
from megatron_rl.records.run_directory import RunDirectory, run_directory_path
from megatron_rl.records.run_lock import mark_run_alive
from megatron_rl.run.checkpoints.belief_transfer import read_transferred_beliefs
from megatron_rl.run.checkpoints.disk_space import require_disk_space
from megatron_rl.run.checkpoints.resume import ResumePoint, find_resume_point, open_run_directory
from megatron_rl.run.checkpoints.resumed_directory import claim_directory, is_complete
from megatron_rl.run.setup import RunSetup
from megatron_rl.run.supervision.open_parts import OpenParts
from megatron_rl.run.supervision.supervision import Supervision
from megatron_rl.training.collectives import broadcast_bytes

# Rank 0 sends it before the path of a run that is complete
_COMPLETE = "complete:"


class RankZeroFailed(Failure):
    """Raised on the other ranks when rank 0 could not open the run; rank 0 reports why."""

    exit_code = ExitCode.PEER_FAILED


def open_run(c: Configuration, supervision: Supervision) -> tuple[RunDirectory, Callable[[], None]]:
    """Open everything that this rank needs (a collective).

    Returns the directory of the run and the loop of this rank, which runs to the end of the run.
    Raises `RunDirectoryTaken`, `NotEnoughDiskSpace`, `BeliefsUnavailable` and
    `CheckpointOfOtherRun` on rank 0, and `NoCompleteCheckpoint` on all ranks.
    """
    progress = supervision.progress
    parts = supervision.parts
    shape = read_shape(c.model.path)
    job = join(c.parallel)
    parts.callback(leave)
    resume_point = _find_resume_point(c, job, progress, parts)
    setup = _open_directory(c, shape, job, resume_point, supervision)
    if setup.is_complete:
        progress.log(
            f"the run in {setup.directory.path} is complete. To train further, raise "
            "train.total_steps or eval.stop_at"
        )
        return setup.directory, _do_nothing
    progress.log(
        f"{job.world_size} rank(s) on {job.num_nodes} node(s); run directory {setup.directory.path}"
    )
    _log_resume_point(setup)
    engines = None
    if c.mode != "train_only":
        engines = parts.enter(open_engines(sized_for_all_phases(c), shape, job, setup.directory))
        parts.kill_on_failure(engines.kill_processes)
        progress.log(f"{engines.description}; importing Megatron meanwhile")
    return setup.directory, _open_loop(setup, engines, supervision)


def _open_loop(
    setup: RunSetup, engines: Engines | None, supervision: Supervision
) -> Callable[[], None]:
    with setup.progress.task("importing Megatron"):
        from megatron_rl.mcore import compat

        compat.install()
        from megatron_rl.run.open_loop import open_loop  # Megatron must follow the line above
    return open_loop(setup, engines, supervision)


def _find_resume_point(
    c: Configuration, job: Job, progress: Progress, parts: OpenParts
) -> ResumePoint:
    """Find the checkpoint to resume from, once no process of the run lives.

    A living one could still delete it.
    """

    def claim() -> str:
        lock = claim_directory(c)
        if lock is not None:
            parts.enter(lock)
        return "claimed"

    if c.run.resume == "auto":
        with progress.task("waiting for the processes of the previous run to end"):
            _run_on_rank_zero(job, claim)
    with progress.task("comparing the checkpoint with its hashes"):
        return find_resume_point(c, job)


def _open_directory(
    c: Configuration,
    shape: ModelShape,
    job: Job,
    resume_point: ResumePoint,
    supervision: Supervision,
) -> RunSetup:
    """Rank 0 makes or reopens the directory, and all ranks mark the run as alive."""
    path = run_directory_path(c.run, datetime.datetime.now())
    warnings: list[str] = []
    beliefs: list[TransferredBeliefs] = []

    def open_on_rank_zero() -> str:
        resume_point.changed_settings(c)
        if _is_complete(c, path, resume_point):
            return f"{_COMPLETE}{path}"
        require_disk_space(c, shape, resume_point.checkpoint)
        transferred_beliefs = read_transferred_beliefs(c, resume_point.state)
        if transferred_beliefs is not None:
            beliefs.append(transferred_beliefs)
            warnings.extend(transferred_beliefs.warnings)
        if c.run.resume == "auto":
            warnings.extend(_warn_of_restart(path, resume_point))
        return str(open_run_directory(c, resume_point, ranks=job.world_size).path)

    text = _run_on_rank_zero(job, open_on_rank_zero)
    has_ended = text.startswith(_COMPLETE)
    directory = RunDirectory(Path(text.removeprefix(_COMPLETE)))
    _accompany(directory, supervision)
    return RunSetup(
        configuration=c,
        shape=shape,
        job=job,
        resume_point=resume_point,
        directory=directory,
        beliefs=beliefs[0] if beliefs else None,
        warnings=tuple(warnings),
        is_complete=has_ended,
        progress=supervision.progress,
    )


def _accompany(directory: RunDirectory, supervision: Supervision) -> None:
    """Report to the directory of the run from now on, and mark the run as alive."""
    supervision.reporter.directory = directory.path
    with contextlib.suppress(OSError):  # a file system without locks
        supervision.parts.enter(mark_run_alive(directory.path))


def _is_complete(c: Configuration, path: Path, resume_point: ResumePoint) -> bool:
    """True when nothing is left to do for the run to resume."""
    if c.run.resume != "auto" or resume_point.state is None:
        return False
    return is_complete(c, path, resume_point.state.position)


def _do_nothing() -> None:
    """Serve as the loop of a run that is complete."""


def _warn_of_restart(path: Path, resume_point: ResumePoint) -> Iterator[str]:
    """Warn when a run that has records starts again, because no checkpoint is left of it."""
    metrics = RunDirectory(path).metrics_file
    if resume_point.state is None and metrics.exists() and metrics.stat().st_size:
        yield (
            f"{path} has records but no checkpoint. The run starts again from step 0, and its "
            "earlier records move to resumed/"
        )


def _log_resume_point(setup: RunSetup) -> None:
    """Log everything that the user should know about the start."""
    log = setup.progress.log
    run = setup.configuration.run
    resume_point = setup.resume_point
    if run.resume == "auto" and not run.checkpoint_every:
        log(
            "warning: run.resume=auto resumes from checkpoints, and run.checkpoint_every=0 saves "
            "none: if this run is stopped, its training is lost"
        )
    for checkpoint in resume_point.damaged_checkpoints:
        log(f"warning: skipping a damaged checkpoint: {checkpoint}")
    for warning in setup.warnings:
        log(f"warning: {warning}")
    if resume_point.state is not None:
        log(f"resuming after step {resume_point.state.step}, from {resume_point.checkpoint}")
    for change in resume_point.changed_settings(setup.configuration):
        log(f"changed since the checkpoint: {change}")


def _run_on_rank_zero(job: Job, action: Callable[[], str]) -> str:
    """Run an action on rank 0; every rank returns its text (a collective).

    action: returns a text that is not empty. Raises `RankZeroFailed` on the other ranks when it
    fails.
    """
    text = ""
    if job.rank == 0:
        try:
            text = action()
        finally:
            broadcast_bytes(text.encode(), job.control_group)
        return text
    text = broadcast_bytes(None, job.control_group).decode()
    if not text:
        raise RankZeroFailed("rank 0 could not open the run")
    return text
