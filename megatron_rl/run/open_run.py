"""Opens the parts of one rank in order, up to the loop that the rank runs.

Engines take the longest to load. They are started first, and Megatron is imported meanwhile.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from megatron_rl.config.curriculum import sized_for_engines
from megatron_rl.config.schema import Configuration, RunSettings, TrainSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.plugins import PluginError
from megatron_rl.engines.engines import Engines, open_engines
from megatron_rl.mcore.collectives import broadcast_bytes
from megatron_rl.mcore.gpu_libraries import require_transformer_engine
from megatron_rl.mcore.job import Job, join, leave
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.prompts.selection.transferred_beliefs import TransferredBeliefs
from megatron_rl.records.run_directory import RunDirectory, run_directory_path
from megatron_rl.records.run_lock import mark_run_alive
from megatron_rl.records.starts import (
    End,
    Start,
    new_start,
    read_starts,
    with_last_end,
    write_starts,
)
from megatron_rl.run.checkpoints.belief_transfer import read_transferred_beliefs
from megatron_rl.run.checkpoints.disk_space import require_disk_space
from megatron_rl.run.checkpoints.reference import identify_reference
from megatron_rl.run.checkpoints.resume import ResumePoint, find_resume_point, open_run_directory
from megatron_rl.run.checkpoints.resumed_directory import (
    archive_exit_record,
    claim_directory,
    is_complete,
)
from megatron_rl.run.data import RunData
from megatron_rl.run.setup import RunSetup
from megatron_rl.run.supervision.restarts import refusal_of_repeated_failure
from megatron_rl.run.supervision.supervision import Supervision
from megatron_rl.run.user_classes import require_user_classes, user_class_names

# What rank 0 tells the others about the run
_OPEN = "open"
_COMPLETE = "complete"


@dataclass
class _Opening:
    """The result of opening the directory.

    is_complete: the run was resumed, and nothing is left to do. log_lines: lines for the user, on
    rank 0 alone.
    """

    is_complete: bool = False
    log_lines: list[str] = field(default_factory=list)


def open_run(
    c: Configuration, read_data: RunData | Exception | None, supervision: Supervision
) -> tuple[RunDirectory, Callable[[], None]]:
    """Open everything that this rank needs (a collective).

    read_data: the data of the run, or the error of reading it; None on the other ranks.

    Returns the directory of the run and the loop of this rank, which runs to the end of the run.
    Raises `ConfigurationRefused` for a Transformer Engine that does not run on this rank's GPU.
    Raises the error of reading the data, `PluginError`, `PromptDataError` and `BadRecording` on
    rank 0, and `Failure` on all ranks.
    """
    progress = supervision.progress
    shape = read_shape(c.model.path)
    job = join(c.parallel)
    supervision.parts.callback(leave)
    data = _require_inputs(c, read_data, job, supervision)
    directory = _agree_on_directory(c.run, job)
    resume_point = _find_resume_point(c.run.resume, directory, job, supervision)
    reference_digest = _identify_reference(c, resume_point, job, supervision)
    opening = _open_directory(c, data, shape, job, resume_point, directory, supervision)
    _accompany(directory, supervision)
    for line in opening.log_lines:
        progress.log(line)
    if opening.is_complete:
        return directory, _do_nothing
    engines = None
    if c.has_engines:
        engines = supervision.parts.enter(open_engines(sized_for_engines(c), shape, job, directory))
        supervision.parts.kill_on_failure(engines.kill_processes)
        progress.log(f"{engines.description}; importing Megatron meanwhile")
    setup = RunSetup(
        configuration=c,
        shape=shape,
        job=job,
        resume_point=resume_point,
        directory=directory,
        data=data,
        progress=progress,
        reference_digest=reference_digest,
    )
    return directory, _open_loop(setup, engines, supervision)


def _open_loop(
    setup: RunSetup, engines: Engines | None, supervision: Supervision
) -> Callable[[], None]:
    with setup.progress.task("importing Megatron"):
        from megatron_rl.mcore import compat

        compat.install()
        from megatron_rl.run.open_loop import open_loop  # Megatron must follow the line above
    return open_loop(setup, engines, supervision)


def _require_inputs(
    c: Configuration, read_data: RunData | Exception | None, job: Job, supervision: Supervision
) -> RunData | None:
    """Return the data of the run once rank 0 has it and all user-defined classes (a collective).

    Every rank first looks at its Transformer Engine.
    """
    require_transformer_engine(c.model)

    def require() -> str:
        if isinstance(read_data, Exception):
            raise read_data
        names = ", ".join(user_class_names(c))
        failure = PluginError(
            f"parallel.timeout_s={c.parallel.timeout_s:g}: {names} took longer to open. Make the "
            "constructor faster, or raise it"
        )
        with (
            supervision.watchdog.time_limit(c.parallel.timeout_s, failure),
            supervision.progress.task(f"opening {names}"),
        ):
            require_user_classes(c)
        return "read"

    _run_on_rank_zero(job, require)
    return None if isinstance(read_data, Exception) else read_data


def _agree_on_directory(run: RunSettings, job: Job) -> RunDirectory:
    """Return the directory that rank 0 names: the clocks of ranks differ (a collective)."""

    def name_path() -> str:
        return str(run_directory_path(run, datetime.datetime.now()))

    return RunDirectory(Path(_run_on_rank_zero(job, name_path)))


def _find_resume_point(
    resume: str, directory: RunDirectory, job: Job, supervision: Supervision
) -> ResumePoint:
    """Find the checkpoint to resume from, once no process of the run lives (a collective).

    A living one could still delete it.
    """
    progress = supervision.progress

    def claim() -> str:
        lock = claim_directory(directory.path)
        if lock is not None:
            supervision.parts.enter(lock)
        return "claimed"

    if resume == "auto":
        with progress.task("waiting for the processes of the previous run to end"):
            _run_on_rank_zero(job, claim)
    with progress.task("comparing the checkpoint with its hashes"):
        return find_resume_point(resume, directory, job)


def _identify_reference(
    c: Configuration, resume_point: ResumePoint, job: Job, supervision: Supervision
) -> str:
    """Return the digest of the KL penalty's reference, empty without one (a collective)."""
    with supervision.progress.task("hashing the weights of the reference"):
        return identify_reference(c, resume_point, job)


def _open_directory(
    c: Configuration,
    data: RunData | None,
    shape: ModelShape,
    job: Job,
    resume_point: ResumePoint,
    directory: RunDirectory,
    supervision: Supervision,
) -> _Opening:
    """Make or reopen the directory of the run on rank 0 (a collective)."""
    opening = _Opening()

    def open_on_rank_zero() -> str:
        changes = resume_point.changed_settings(c)
        if c.run.resume == "auto" and resume_point.state is not None:
            position = resume_point.state.position
            opening.is_complete = is_complete(directory.path, position, c.train, c.eval)
        if opening.is_complete:
            opening.log_lines.append(
                f"the run in {directory.path} is complete. To train further, raise "
                "train.total_steps or eval.stop_at"
            )
            return _COMPLETE
        starts = starts_with_this_one(c.run, resume_point, directory.path, supervision)
        require_disk_space(c, shape, resume_point.checkpoint)
        assert data is not None, "rank 0 has read the data"
        beliefs = _restore_data(c, data, resume_point)
        opening.log_lines.append(
            f"{job.world_size} rank(s) on {job.num_nodes} node(s); run directory {directory.path}"
        )
        opening.log_lines += (f"warning: {warning}" for warning in data.warnings)
        opening.log_lines += _warnings(c, directory, resume_point, beliefs)
        opening.log_lines += resume_lines(resume_point, changes, c.mode)
        _open_files(directory, c, resume_point, job, starts)
        return _OPEN

    opening.is_complete = _run_on_rank_zero(job, open_on_rank_zero) == _COMPLETE
    return opening


def _open_files(
    directory: RunDirectory,
    c: Configuration,
    resume_point: ResumePoint,
    job: Job,
    starts: Sequence[Start],
) -> None:
    """Make or reopen the directory, and record this start, the last one of `starts`."""
    open_run_directory(directory, c, resume_point, ranks=job.world_size)
    write_starts(directory.path, starts)


def starts_with_this_one(
    run: RunSettings, resume_point: ResumePoint, path: Path, supervision: Supervision
) -> tuple[Start, ...]:
    """Return the starts of the run up to this one. Rank 0 only.

    Raises `Failure` if the last ones failed alike. The refusal is then the end of the run,
    and the last one of its starts.
    """
    starts: tuple[Start, ...] = ()
    if run.resume == "auto" and path.exists():
        starts = with_last_end(read_starts(path), path)
    state = resume_point.state
    start = new_start(1 if state is None else state.step + 1, os.environ)
    refusal = refusal_of_repeated_failure(starts, start.first_step)
    if refusal is None:
        return (*starts, start)
    end = End(start.first_step, refusal.exit_code, str(refusal))
    archive_exit_record(path)
    write_starts(path, (*starts, msgspec.structs.replace(start, end=end)))
    supervision.reporter.directory = path
    raise refusal


def _restore_data(
    c: Configuration, data: RunData, resume_point: ResumePoint
) -> TransferredBeliefs | None:
    """Move the data to the checkpoint's position, and apply the beliefs of another run.

    Returns these beliefs. Raises `PromptDataError` or `BadRecording` if they, or the checkpoint,
    belong to other data, and `Failure`.
    """
    beliefs = read_transferred_beliefs(c, resume_point.state)
    if resume_point.state is not None:
        data.seek(resume_point.state.position.selection)
    if beliefs is not None:
        beliefs.apply_to(data.training_prompts)
    return beliefs


def resume_lines(resume_point: ResumePoint, changes: Iterable[str], mode: str) -> Iterator[str]:
    """Yield where the run resumes, or what it measures, and the settings that have changed."""
    if resume_point.state is not None:
        verb = "measuring the weights" if mode in ("eval", "profile") else "resuming"
        yield f"{verb} after step {resume_point.state.step}, from {resume_point.checkpoint}"
    for change in changes:
        yield f"changed since the checkpoint: {change}"


def _warnings(
    c: Configuration,
    directory: RunDirectory,
    resume_point: ResumePoint,
    beliefs: TransferredBeliefs | None,
) -> Iterator[str]:
    """Yield the warnings that the user should read at the start."""
    is_resumable = c.run.resume == "auto"
    if is_resumable and not c.run.checkpoint_every:
        yield (
            "warning: run.resume=auto resumes from checkpoints, and run.checkpoint_every=0 saves "
            "none: if this run is stopped, its training is lost"
        )
    missing_settings = resume_point.missing_settings(c)
    if missing_settings:
        yield (
            "settings of the checkpoint that this run does not have, of another algorithm or "
            f"version: {', '.join(missing_settings)}"
        )
    for checkpoint in resume_point.damaged_checkpoints:
        yield f"warning: skipping a damaged checkpoint: {checkpoint}"
    if beliefs is not None:
        yield from (f"warning: {warning}" for warning in beliefs.warnings)
    metrics = directory.metrics_file
    starts_again = is_resumable and resume_point.state is None
    if starts_again and metrics.exists() and metrics.stat().st_size:
        yield (
            f"warning: {directory.path} has records but no checkpoint. The run starts again from "
            "step 0, and its earlier records move to resumed/"
        )
    tokens = c.train.tokens_per_micro_batch
    longest = c.data.max_prompt_tokens + c.rollout.max_new_tokens
    if tokens < min(longest, TrainSettings.tokens_per_micro_batch):
        count = c.rollout.prompts_per_step * c.rollout.samples_per_prompt
        yield (
            f"warning: train.tokens_per_micro_batch={tokens}, and a rollout has up to {longest} "
            "tokens with its prompt: each longer one is a micro-batch of its own. A step has "
            f"{count} rollouts, and may take long"
        )


def _accompany(directory: RunDirectory, supervision: Supervision) -> None:
    """Report to the directory of the run from now on, and mark the run as alive."""
    supervision.reporter.directory = directory.path
    with contextlib.suppress(OSError):  # a file system without locks
        supervision.parts.enter(mark_run_alive(directory.path))


def _do_nothing() -> None:
    """Serve as the loop of a run that is complete."""


def _run_on_rank_zero(job: Job, action: Callable[[], str]) -> str:
    """Run an action on rank 0; every rank returns its text (a collective).

    action: returns a text that is not empty. Raises `Failure` on the other ranks when it
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
        raise Failure("rank 0 could not open the run", ExitCode.PEER_FAILED)
    return text
