"""Where a run begins: at its start checkpoint, or at the newest whole checkpoint of a run."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.run_state import RunState
from megatron_rl.mcore.job import Job
from megatron_rl.prompts.selection.transferred_beliefs import TransferredBeliefs
from megatron_rl.records.past_run import flat_settings
from megatron_rl.records.run_directory import RunDirectory, run_directory_path, to_yaml
from megatron_rl.run.checkpoints.manifest import NAME as MANIFEST
from megatron_rl.run.checkpoints.manifest import (
    DamagedCheckpoint,
    Manifest,
    changed_files,
    read_manifest,
)
from megatron_rl.run.checkpoints.resumed_directory import reopen_directory
from megatron_rl.run.checkpoints.state_file import read_state
from megatron_rl.run.checkpoints.store import CheckpointStore
from megatron_rl.training.collectives import broadcast_bytes, gather_bytes

if TYPE_CHECKING:
    from megatron_rl.training.worker import Worker

# What a checkpoint's numbers mean follows from these. Of the others a run that goes on takes the
# new values.
_MODEL = ("model.path", "model.init")
_PATHS = (
    "model.path",
    "rollout.recording",
    "data.train_path",
    "data.eval_path",
    "selection.beliefs_from",
)
_FIXED = (
    "model.path",
    "model.init",
    "seed",
    "mode",
    "data.",
    "rollout.prompts_per_step",
    "rollout.recording",
    "curriculum",
)


class NoCompleteCheckpoint(Failure):
    """There are checkpoints, and none of them can be gone on from."""

    exit_code = ExitCode.BAD_DATA


class CheckpointUnusable(Failure):
    """A checkpoint is as it was saved, and cannot be loaded: it is of another model, or of another
    version.
    """

    exit_code = ExitCode.BAD_DATA


class CheckpointOfOtherRun(Failure):
    """The checkpoint is of a run whose settings do not fit those given."""

    exit_code = ExitCode.REFUSED


@dataclass(frozen=True)
class ResumePoint:
    """checkpoint, state: what the run goes on from, None for a new one. damaged: newer checkpoints,
    and why.

    beliefs: of another run, which rank 0 begins with.
    """

    checkpoint: Path | None = None
    state: RunState | None = None
    damaged: tuple[str, ...] = ()
    beliefs: TransferredBeliefs | None = None

    def load(self, worker: Worker) -> str:
        """Every rank's tensors and random numbers (a collective). Returns what does not go on as it
        was.

        Raises `CheckpointUnusable`.
        """
        if self.checkpoint is None or self.state is None:
            return ""
        from megatron_rl.mcore.checkpoint import load_random_state, load_tensors, random_state_file

        steps, world_size = self.state.optimizer_steps, worker.layout.world_size
        with loading(self.checkpoint):
            load_tensors(
                worker.policy.models, worker.optimizer, self.checkpoint, optimizer_steps=steps
            )
            if world_size != self.state.world_size:
                return f"{self.state.world_size} ranks saved it: random numbers (dropout) start anew on {world_size}"
            load_random_state(random_state_file(self.checkpoint, worker.layout.rank))
        return ""

    def changed(self, c: Configuration) -> list[str]:
        """Settings that are not those of the checkpoint, as `key: old -> new`. Raises
        `CheckpointOfOtherRun`.
        """
        if self.state is None:
            return []
        now, before = flat_configuration(c), self.state.settings
        different = [key for key in now if not _same(key, now[key], before.get(key, now[key]))]
        told = {key: f"{key}: {before[key]!r} -> {now[key]!r}" for key in different}
        measures = c.mode in ("eval", "profile")
        kept = _MODEL if measures else _FIXED
        if fixed := [told[key] for key in different if key.startswith(kept)]:
            raise CheckpointOfOtherRun(
                f"run.resume={c.run.resume!r}: {self.checkpoint} is of a run with other settings ({'; '.join(fixed)}). "
                "Give the old ones, or start another run"
            )
        return [told[key] for key in different if not key.startswith("run.") and not measures]


def _same(key: str, now: Any, before: Any) -> bool:
    """Whether two values mean the same: a path may be written in several ways."""
    if key in _PATHS and isinstance(now, str) and isinstance(before, str):
        return (
            now == before or Path(now).expanduser().resolve() == Path(before).expanduser().resolve()
        )
    return bool(now == before)


@contextlib.contextmanager
def loading(checkpoint: Path) -> Iterator[None]:
    """Raises `CheckpointUnusable` for whatever its files are found to be."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise CheckpointUnusable(
            f"{checkpoint} cannot be loaded: {error}. Give the model and the version that saved it, or another "
            "checkpoint: run.resume=PATH under another run.name"
        ) from error


def flat_configuration(c: Configuration) -> dict[str, Any]:
    """Every key as a checkpoint keeps it."""
    return flat_settings(to_yaml(c))


def find_resume_point(c: Configuration, job: Job) -> ResumePoint:
    """The newest whole checkpoint that run.resume speaks of (a collective).

    Raises `NoCompleteCheckpoint` on all ranks.
    """
    if c.run.resume == "never":
        return ResumePoint()
    checkpoint, damaged = newest_complete(_candidates(c) if job.rank == 0 else (), job)
    if checkpoint is not None:
        return ResumePoint(checkpoint, read_state(checkpoint), damaged)
    if damaged or c.run.resume != "auto":
        raise NoCompleteCheckpoint(
            f"run.resume={c.run.resume!r}: no whole checkpoint is there ({' | '.join(damaged) or 'none at all'}). "
            "Give another one, or start anew with run.resume=never"
        )
    return ResumePoint()


def newest_complete(candidates: Sequence[Path], job: Job) -> tuple[Path | None, tuple[str, ...]]:
    """The first checkpoint that is as it was saved, and those before it with what is wrong with
    them (a collective).

    candidates: rank 0's count.
    """
    named = msgspec.msgpack.encode([str(path) for path in candidates]) if job.rank == 0 else None
    damaged: list[str] = []
    for candidate in map(
        Path, msgspec.msgpack.decode(broadcast_bytes(named, job.control_group), type=list[str])
    ):
        problems = _problems(candidate, job)
        if not problems:
            return candidate, tuple(damaged)
        damaged.append(f"{candidate}: {'; '.join(problems)}")
    return None, tuple(damaged)


def open_run_directory(c: Configuration, start: ResumePoint, *, ranks: int = 1) -> RunDirectory:
    """The run's directory: a new one, or the claimed one of the run that goes on. Rank 0 only.

    Raises `RunDirectoryTaken`.
    """
    now = datetime.datetime.now()
    directory = RunDirectory(run_directory_path(c.run, now))
    if c.run.resume != "auto" or not directory.path.exists():
        return RunDirectory.create(c, now, ranks=ranks)
    reopen_directory(c, start.state.position if start.state is not None else None)
    shelf = CheckpointStore(directory.checkpoints)
    for newer in shelf.saved():
        if start.checkpoint is not None and newer.name > start.checkpoint.name:
            shelf.set_aside(newer)
    return directory


def _candidates(c: Configuration) -> Sequence[Path]:
    if c.run.resume == "auto":
        return CheckpointStore(_directory(c).checkpoints).saved()
    return checkpoints_at(Path(c.run.resume))


def checkpoints_at(path: Path) -> Sequence[Path]:
    """The checkpoints of a run, newest first; or the one that the path names."""
    given = path.expanduser().resolve()
    if (given / MANIFEST).exists() or not given.is_dir():
        return [given]
    return (
        CheckpointStore(given / "checkpoints").saved() or CheckpointStore(given).saved() or [given]
    )


def _directory(c: Configuration) -> RunDirectory:
    return RunDirectory(run_directory_path(c.run, datetime.datetime.now()))


def _problems(checkpoint: Path, job: Job) -> list[str]:
    """What is wrong with a checkpoint; every rank reads its share of the files (a collective)."""
    manifest: Manifest | None = None
    problems: list[str] = []
    try:
        manifest = read_manifest(checkpoint)
        read_state(checkpoint)
    except (DamagedCheckpoint, ValueError) as error:
        problems = [str(error)]
    names: Mapping[str, object] = manifest.files if manifest is not None else {}
    if manifest is not None and not problems:
        problems = changed_files(checkpoint, manifest, list(names)[job.rank :: job.world_size])
    everyones = gather_bytes(msgspec.msgpack.encode(problems), job.control_group)
    found = [
        problem for data in everyones for problem in msgspec.msgpack.decode(data, type=list[str])
    ]
    return list(dict.fromkeys(found))
