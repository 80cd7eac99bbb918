"""Finds the checkpoint that a run resumes from, and loads it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from megatron_rl.config.curriculum import phases_of
from megatron_rl.config.schema import Configuration, RolloutSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.run_state import RunState
from megatron_rl.mcore.collectives import broadcast_bytes, gather_texts
from megatron_rl.mcore.job import Job
from megatron_rl.records.past_run import flat_settings
from megatron_rl.records.run_directory import RunDirectory, to_yaml
from megatron_rl.rollouts.steps.steps_ahead import largest_age
from megatron_rl.run.checkpoints.manifest import (
    MANIFEST_NAME,
    DamagedCheckpoint,
    Manifest,
    changed_files,
    read_manifest,
)
from megatron_rl.run.checkpoints.resumed_directory import reopen_directory
from megatron_rl.run.checkpoints.state_file import read_state
from megatron_rl.run.checkpoints.store import CheckpointStore, step_of

if TYPE_CHECKING:
    from megatron_rl.training.worker import Worker

# These keys and sections give the saved state its meaning, so a resumed run cannot change them
_FIXED_KEYS = (
    "model.path",
    "model.init",
    "seed",
    "mode",
    "data",
    "rollout.prompts_per_step",
    "rollout.recording",
    "curriculum",
)
# mode=eval and mode=profile load the weights only
_FIXED_KEYS_OF_MEASUREMENTS = ("model.path", "model.init")
_PATH_KEYS = (
    "model.path",
    "algo.kl.reference",
    "rollout.recording",
    "data.train_path",
    "data.eval_path",
    "selection.beliefs_from",
)
_STALENESS = "rollout.max_staleness"
_TEMPERATURE = "rollout.temperature"
_LENGTH = "rollout.max_new_tokens"
_TRUNCATED = "rollout.train_truncated"
_ON_UPDATE = "rollout.on_update"
_SOURCES = "data.sources."
# Sections whose keys the user chooses: a key that is missing differs from any value
_FREE_SECTIONS = (_SOURCES, "reward.options.", "reward.parts.", "environment.options.")
# Keys that decide what a rollout is, and what it is worth
_VERDICT_KEYS = (
    "reward.name",
    "reward.answer",
    "reward.options",
    "reward.parts",
    "environment.name",
    "environment.options",
)
# Keys of older checkpoints, and the keys that have their values
_RENAMED_KEYS = (
    (re.compile(r"(environment)\.tool"), r"\1.options.tool"),
    (re.compile(r"(data(?:\.sources\.[^.]+)?)\.task"), r"\1.options.task"),
    (re.compile(r"(data(?:\.sources\.[^.]+)?)\.task_config(\..+|)"), r"\1.options\2"),
)
# The paths of a mixture's sources, which have names of their own
_SOURCE_PATH = re.compile(r"data\.sources\.[^.]+\.(train|eval)_path")


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from.

    checkpoint, state: None for a new run. damaged_checkpoints: the newer checkpoints that cannot
    be used, each with the reason.
    """

    checkpoint: Path | None = None
    state: RunState | None = None
    damaged_checkpoints: tuple[str, ...] = ()

    def load(self, worker: Worker) -> str:
        """Load the tensors and random numbers of every rank (a collective).

        Returns a warning about the part that cannot be restored, or an empty text. Raises
        `Failure`.
        """
        if self.checkpoint is None or self.state is None:
            return ""
        from megatron_rl.mcore.checkpoint import load_random_state, load_tensors, random_state_file

        world_size = worker.layout.world_size
        with explained_load_errors(self.checkpoint):
            load_tensors(
                worker.policy.models,
                worker.optimizer,
                self.checkpoint,
                optimizer_steps=self.state.optimizer_steps,
                group=worker.layout.control_group,
            )
            if world_size != self.state.world_size:
                return (
                    f"the checkpoint has random numbers (dropout) for {self.state.world_size} "
                    f"ranks: they start anew on {world_size} ranks"
                )
            load_random_state(random_state_file(self.checkpoint, worker.layout.rank))
        return ""

    def changed_settings(self, c: Configuration) -> list[str]:
        """The settings that differ from the checkpoint, as `key: old -> new`.

        Settings under `run.` are not listed. mode=eval and mode=profile list `data.` alone: with
        other data they may measure on questions that the run trained on. Raises
        `Failure` when a setting differs that cannot change.
        """
        if self.state is None:
            return []
        changes = _changes(_rename_keys(self.state.settings), flat_configuration(c))
        if not c.is_measurement:
            self._require_staleness(c.rollout)
            self._require_sampling(c, changes)
        fixed_keys = _FIXED_KEYS_OF_MEASUREMENTS if c.is_measurement else _FIXED_KEYS
        refusals = [text for key, text in changes.items() if _is_fixed(key, fixed_keys)]
        if refusals:
            raise Failure(
                f"run.resume={c.run.resume!r}: {self.checkpoint} belongs to a run with other "
                f"settings ({'; '.join(refusals)}). Use the old settings, or start another run",
                ExitCode.REFUSED,
            )
        if c.is_measurement:
            return [text for key, text in changes.items() if key.startswith("data.")]
        return [text for key, text in changes.items() if not key.startswith("run.")]

    def missing_settings(self, c: Configuration) -> list[str]:
        """The settings of the checkpoint that this run does not have, as `key=value`.

        They are of another algorithm, or of another version.
        """
        if self.state is None:
            return []
        settings = _rename_keys(self.state.settings)
        keys = sorted(settings.keys() - flat_configuration(c).keys())
        return [f"{key}={settings[key]!r}" for key in keys if not key.startswith(_FREE_SECTIONS)]

    def _require_staleness(self, rollout: RolloutSettings) -> None:
        """Raise `Failure` unless all rollouts of later steps may be trained."""
        assert self.state is not None
        position = self.state.position
        if position.open_steps:
            content = f"open rollouts of step(s) {list(position.open_steps)}"
        elif position.steps_ahead:
            content = f"the rollouts of {len(position.steps_ahead)} step(s) that were sampled ahead"
        else:
            return
        # The number of these steps does not tell how old their tokens are
        settings = self.state.settings
        saved_age = largest_age(
            settings[_STALENESS], continues_responses=settings.get(_ON_UPDATE, "wait") != "wait"
        )
        age = largest_age(rollout.max_staleness, continues_responses=rollout.on_update != "wait")
        if saved_age <= age:
            return
        remedy = f"Give at least {saved_age}"
        if saved_age > 1 and rollout.on_update == "wait":
            remedy += f", and {_ON_UPDATE}=resume"
        raise Failure(
            f"{_STALENESS}={rollout.max_staleness}: with {_ON_UPDATE}={rollout.on_update}, a token "
            f"may be at most {age} version(s) old. {self.checkpoint} holds {content}, of up to "
            f"{saved_age} version(s). {remedy}",
            ExitCode.REFUSED,
        )

    def _require_sampling(self, c: Configuration, changes: Mapping[str, str]) -> None:
        """Raise `Failure` if rollouts of later steps were sampled with other settings.

        changes: the changed settings by key. The trainer computes log-probabilities at the present
        temperature, so rollouts of another one would have wrong ratios. Whether a token receives a
        loss is stored with it. A group needs one scorer.
        The base value of a key that the first phase of the curriculum sets is never used.
        """
        assert self.state is not None
        position = self.state.position
        steps = [*position.steps_ahead, *position.open_steps]
        keys = [_TEMPERATURE, _TRUNCATED] if steps else []
        if position.open_steps:
            keys.append(_LENGTH)
            keys += [key for key in changes if _is_fixed(key, _VERDICT_KEYS)]
        changed_keys = {key for key in keys if key in changes}
        if changed_keys:
            changed_keys -= {key for phase in phases_of(c)[:1] for key in phase.changes}
        refusals = [changes[key] for key in keys if key in changed_keys]
        if refusals:
            raise Failure(
                f"{'; '.join(refusals)}: {self.checkpoint} holds rollouts of step(s) {steps}. They "
                "were sampled with the old value. Use it. If it must change, train these steps "
                f"with it first: train.total_steps={max(steps)}, where a schedule of the learning "
                "rate then ends, too",
                ExitCode.REFUSED,
            )


@contextlib.contextmanager
def explained_load_errors(checkpoint: Path) -> Iterator[None]:
    """Turn errors in the files of a checkpoint into `Failure`."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise Failure(
            f"{checkpoint} cannot be loaded: {error}. Use the model and the version that saved it, "
            "or another checkpoint: run.resume=PATH under another run.name",
            ExitCode.BAD_DATA,
        ) from error


def flat_configuration(c: Configuration) -> dict[str, Any]:
    """Every key of a configuration with its value, as checkpoints store it."""
    return flat_settings(to_yaml(c))


def find_resume_point(resume: str, directory: RunDirectory, job: Job) -> ResumePoint:
    """Find the newest complete checkpoint that run.resume names (a collective).

    resume: the value of run.resume. directory: the directory of this run, which `auto` means.
    Raises `Failure` on all ranks.
    """
    if resume == "never":
        return ResumePoint()
    candidates: list[Path] = []
    if job.rank == 0 and resume == "auto":
        candidates = CheckpointStore(directory.checkpoints).checkpoints()
    elif job.rank == 0:
        candidates = checkpoints_at(Path(resume))
    checkpoint, problems = newest_complete(candidates, job)
    if checkpoint is not None:
        return ResumePoint(checkpoint, read_state(checkpoint), problems)
    if problems or resume != "auto":
        reasons = " | ".join(problems) or "there is none at all"
        raise Failure(
            f"run.resume={resume!r}: there is no complete checkpoint ({reasons}). Give "
            "another one, or start a new run with run.resume=never",
            ExitCode.BAD_DATA,
        )
    return ResumePoint()


def newest_complete(candidates: Sequence[Path], job: Job) -> tuple[Path | None, tuple[str, ...]]:
    """Find the first checkpoint that is complete and undamaged (a collective).

    candidates: the checkpoints, newest first. The list of rank 0 counts. Returns the checkpoint,
    and the earlier candidates with their problems.
    """
    message = None
    if job.rank == 0:
        message = msgspec.msgpack.encode([str(path) for path in candidates])
    names = msgspec.msgpack.decode(broadcast_bytes(message, job.control_group), type=list[str])
    problems: list[str] = []
    for name in names:
        defects = _defects(Path(name), job)
        if not defects:
            return Path(name), tuple(problems)
        problems.append(f"{name}: {'; '.join(defects)}")
    return None, tuple(problems)


def open_run_directory(
    directory: RunDirectory, c: Configuration, resume_point: ResumePoint, *, ranks: int = 1
) -> None:
    """Make the directory of a new run, or reopen the one that is resumed. Rank 0 only.

    `claim_directory` must have claimed the directory of a resumed run. Raises `Failure`.
    """
    if c.run.resume != "auto" or not directory.path.exists():
        directory.create(c, ranks=ranks)
        return
    state = resume_point.state
    reopen_directory(directory, to_yaml(c), None if state is None else state.position)
    if resume_point.checkpoint is not None:
        store = CheckpointStore(directory.checkpoints)
        resumed_step = step_of(resume_point.checkpoint) or 0
        for checkpoint in store.checkpoints():
            if (step_of(checkpoint) or 0) > resumed_step:
                store.set_aside(checkpoint)


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoints of a run, newest first, or the one checkpoint that the path names."""
    path = path.expanduser().resolve()
    if (path / MANIFEST_NAME).exists() or not path.is_dir():
        return [path]
    for folder in (path / "checkpoints", path):
        checkpoints = CheckpointStore(folder).checkpoints()
        if checkpoints:
            return checkpoints
    return [path]


def _rename_keys(saved_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a checkpoint under the keys of this version.

    The result has no older key without a value, and no empty options that get keys.
    """
    settings: dict[str, Any] = {}
    for key, value in saved_settings.items():
        for pattern, new_key in _RENAMED_KEYS:
            if match := pattern.fullmatch(key):
                if value not in (None, {}):
                    settings[match.expand(new_key)] = value
                break
        else:
            settings[key] = value
    parents = {key.rpartition(".")[0] for key in settings}
    return {key: value for key, value in settings.items() if key not in parents}


def _changes(saved_settings: dict[str, Any], settings: dict[str, Any]) -> dict[str, str]:
    """The differences as `key: old -> new`, by key. Keys that the checkpoint lacks are equal.

    Those of a mixture's sources, and options of plugins, are no keys that an older version may
    lack: they differ.
    """
    changes = {}
    for key, value in settings.items():
        missing_value = None if key.startswith(_FREE_SECTIONS) else value
        saved_value = saved_settings.get(key, missing_value)
        if not _is_same(key, value, saved_value):
            changes[key] = f"{key}: {saved_value!r} -> {value!r}"
    for key in saved_settings.keys() - settings.keys():
        if key.startswith(_FREE_SECTIONS):
            end = "no such source" if key.startswith(_SOURCES) else "not given"
            changes[key] = f"{key}: {saved_settings[key]!r} -> {end}"
    return changes


def _is_fixed(key: str, fixed_keys: Sequence[str]) -> bool:
    """True for a fixed key, and for a key of a fixed section."""
    return any(key == fixed_key or key.startswith(f"{fixed_key}.") for fixed_key in fixed_keys)


def _is_same(key: str, value: Any, saved_value: Any) -> bool:
    """True for values with the same meaning: a path can be written in several ways."""
    if value == saved_value:
        return True
    is_path = key in _PATH_KEYS or _SOURCE_PATH.fullmatch(key) is not None
    if not is_path or not isinstance(value, str) or not isinstance(saved_value, str):
        return False
    return Path(value).expanduser().resolve() == Path(saved_value).expanduser().resolve()


def _defects(checkpoint: Path, job: Job) -> list[str]:
    """The defects of a checkpoint. Every rank reads a share of its files (a collective)."""
    manifest: Manifest | None = None
    defects: list[str] = []
    try:
        manifest = read_manifest(checkpoint)
        read_state(checkpoint)
    except (DamagedCheckpoint, ValueError) as error:
        defects = [str(error)]
    if manifest is not None and not defects:
        share = list(manifest.files)[job.rank :: job.world_size]
        defects = changed_files(checkpoint, manifest, share)
    return list(dict.fromkeys(gather_texts(defects, job.control_group)))
