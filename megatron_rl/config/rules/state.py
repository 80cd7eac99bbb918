"""Rules of modes, recorded rollouts, checkpoints, and the directory that a run resumes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from operator import attrgetter
from pathlib import Path

from megatron_rl.config.rules.broken_rule import BrokenRule
from megatron_rl.config.schema import Configuration

_CHECKPOINT_KEYS = (
    "run.keep_checkpoints",
    "run.background_saves",
)
# Values that request nothing, such as eval.every=0.
_EMPTY_VALUES: tuple[object, ...] = (None, False, 0, "", "off", [], {})
_TRAINING_KEYS = ("eval.every", "eval.start_step", "run.save_weights", "samples.", "guard.")
# The keys, or the beginnings of keys, that a mode does not read.
_UNREAD_KEYS = {
    "train_only": ("engine.", "eval."),
    "rollout_only": ("eval.", "run.save_weights", "samples.", "guard."),
    "eval": _TRAINING_KEYS,
    "profile": _TRAINING_KEYS,
}
# Keys, or the beginnings of keys, with their own rules in `check_evaluation`.
_OTHER_RULES = ("eval.stop_at", "eval.sets")


def check_unread_keys(c: Configuration, keys: Collection[str]) -> Iterator[BrokenRule]:
    """Yield a broken rule for each key of the command line that requests something in vain.

    Keys of an experiment's file may go unread. keys: keys that the command line sets.
    """
    for key in sorted(keys):
        if key in _CHECKPOINT_KEYS and not c.run.checkpoint_every and _requests(c, key):
            rule = "With run.checkpoint_every=0 no checkpoint is saved"
            yield BrokenRule(key, rule, "Give run.checkpoint_every=N, or remove it")
        elif (
            key.startswith(_UNREAD_KEYS.get(c.mode, ()))
            and not key.startswith(_OTHER_RULES)
            and _requests(c, key)
        ):
            yield BrokenRule(key, f"This setting has no effect with mode={c.mode}", "Remove it")


def _requests(c: Configuration, key: str) -> bool:
    return attrgetter(key)(c) not in _EMPTY_VALUES


def check_mode(c: Configuration) -> Iterator[BrokenRule]:
    """Yield broken rules about keys that do not fit the mode."""
    yield from _check_recording(c)
    yield from _check_checkpoints(c)
    trains_nothing = c.is_measurement or c.mode == "rollout_only"
    if trains_nothing and c.environment.name == "demonstration":
        rule = "environment.name=demonstration samples no responses"
        yield BrokenRule("mode", rule, "Use mode=train")


def _check_recording(c: Configuration) -> Iterator[BrokenRule]:
    recording = c.rollout.recording
    key = "rollout.recording"
    if c.mode != "train_only":
        if recording is not None:
            rule = f"mode={c.mode} samples its rollouts from engines"
            yield BrokenRule(key, rule, "Remove it, or use mode=train_only")
    elif recording is None:
        rule = "mode=train_only trains on rollouts that a run with mode=rollout_only recorded"
        yield BrokenRule(key, rule, "Give the directory of that run: rollout.recording=runs/NAME")
    elif not Path(recording).expanduser().is_dir():
        rule = f"There is no such directory (from {Path.cwd()})"
        yield BrokenRule(key, rule, "Give the directory of a run")


def _check_checkpoints(c: Configuration) -> Iterator[BrokenRule]:
    if (c.is_measurement or c.mode == "rollout_only") and c.run.checkpoint_every:
        rule = f"mode={c.mode} changes no weights that could be saved"
        yield BrokenRule("run.checkpoint_every", rule, "Use 0")
    if c.is_measurement and c.run.resume == "auto":
        rule = f"mode={c.mode} cannot be resumed"
        yield BrokenRule("run.resume", rule, "Give the path of a checkpoint, or use never")
    if c.mode == "rollout_only" and c.run.resume != "never":
        rule = "mode=rollout_only starts from the start checkpoint, at its first step"
        yield BrokenRule("run.resume", rule, "Use run.resume=never")


def check_resume(c: Configuration) -> Iterator[BrokenRule]:
    """Yield broken rules about the directory or checkpoint that a run starts from."""
    if c.run.resume == "auto":
        yield from _check_automatic_resume(c)
    elif c.run.resume != "never":
        yield from _check_resume_path(c)


def _check_automatic_resume(c: Configuration) -> Iterator[BrokenRule]:
    if c.run.name is None:
        rule = (
            "Without a name the run's directory is named after the time, so it cannot be found "
            "again"
        )
        remedy = "Give the run a name, or the path of a checkpoint: run.resume=runs/NAME"
        yield BrokenRule("run.name", rule, remedy)
    if c.run.on_existing == "overwrite_failed":
        rule = "It would remove the run that run.resume=auto resumes"
        remedy = "Use run.on_existing=refuse, or run.resume=never"
        yield BrokenRule("run.on_existing", rule, remedy)


def _check_resume_path(c: Configuration) -> Iterator[BrokenRule]:
    path = Path(c.run.resume).expanduser()
    if not path.is_dir():
        rule = f"It is not auto, not never and not a directory (from {Path.cwd()})"
        remedy = "Give auto, never, or the directory of a run or of one of its checkpoints"
        yield BrokenRule("run.resume", rule, remedy)
    elif c.run.name is not None:
        directory = Path(c.run.root).expanduser() / c.run.name
        if path.resolve() == directory.resolve():
            rule = "It is the directory of this run itself"
            yield BrokenRule("run.resume", rule, "Use run.resume=auto to resume it")
