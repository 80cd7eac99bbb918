"""What a run does and where it begins: modes, recorded rollouts, checkpoints, and the directory of
a run before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from operator import attrgetter
from pathlib import Path

from megatron_rl.config.schema import Configuration

_SAVING = (
    "run.keep_checkpoints",
    "run.background_saves",
    "run.on_failed_save",
    "run.stop_within_s",
)
_NOTHING: tuple[object, ...] = (None, False, 0, "", "off", [], {})
_REFUSED, _OF_STEPS = (
    ("eval.stop_at", "eval.sets"),
    ("eval.every", "eval.start_step", "run.save_weights"),
)
_UNREAD = {
    "train_only": ("engine.", "eval."),
    "rollout_only": ("eval.", "run.save_weights"),
    "eval": _OF_STEPS,
}


def check_unread(c: Configuration, given: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """What the command line asks for is done; what a recipe brings may idle. Null, false, off and 0
    ask for nothing.
    """
    for key in sorted(given):
        if key in _SAVING and not c.run.checkpoint_every and _asks(c, key):
            yield (
                key,
                "With run.checkpoint_every=0 nothing is saved",
                "Give run.checkpoint_every=N, or remove it",
            )
        elif key.startswith(_UNREAD.get(c.mode, ())) and key not in _REFUSED and _asks(c, key):
            yield key, f"mode={c.mode} has no use for it", "Remove it"


def _asks(c: Configuration, key: str) -> bool:
    return attrgetter(key)(c) not in _NOTHING


def check_mode(c: Configuration) -> Iterator[tuple[str, str, str]]:
    """Half a run has half the keys."""
    recorded = c.rollout.recording
    if c.mode == "train_only":
        if recorded is None:
            rule = "mode=train_only trains on rollouts that a run with mode=rollout_only recorded"
            yield (
                "rollout.recording",
                rule,
                "Give that run's directory: rollout.recording=runs/NAME",
            )
        elif not Path(recorded).expanduser().is_dir():
            yield (
                "rollout.recording",
                f"There is no such directory (from {Path.cwd()})",
                "Give a run's directory",
            )
    elif recorded is not None:
        yield (
            "rollout.recording",
            f"mode={c.mode} draws its rollouts from engines",
            "Remove it, or use mode=train_only",
        )
    if c.mode != "train" and c.eval.stop_at is not None:
        yield (
            "eval.stop_at",
            f"mode={c.mode} has no steps that an accuracy could end",
            "Leave it null",
        )
    if c.mode in ("eval", "profile", "rollout_only") and c.run.checkpoint_every:
        yield (
            "run.checkpoint_every",
            f"mode={c.mode} changes no weights that could be saved",
            "Use 0",
        )
    if c.mode in ("eval", "profile") and c.run.resume == "auto":
        yield (
            "run.resume",
            f"mode={c.mode} goes on with nothing",
            "Give the path of a checkpoint, or use never",
        )
    if c.mode != "eval" and c.eval.sets:
        yield (
            "eval.sets",
            "Only mode=eval measures several sets",
            "Use mode=eval, or data.eval_path for one",
        )
    for name, file in c.eval.sets.items():
        if not Path(file).expanduser().is_file():
            yield (
                "eval.sets",
                f"{name}: there is no such file (from {Path.cwd()})",
                "Give a JSONL file",
            )
    if c.mode == "rollout_only" and c.run.resume != "never":
        rule = "mode=rollout_only records from the start checkpoint, from its first step"
        yield "run.resume", rule, "Use run.resume=never"
    if c.mode in ("rollout_only", "eval", "profile") and c.environment.name == "demonstration":
        yield "mode", "environment.name=demonstration samples nothing", "Use mode=train"


def check_resume(c: Configuration) -> Iterator[tuple[str, str, str]]:
    """One run goes on in one directory, from something that is there."""
    run = c.run
    if run.resume == "auto":
        if run.name is None:
            rule = "The directory of a run without a name is called after the time, and is never found again"
            yield (
                "run.name",
                rule,
                "Give the run a name, or the path of a checkpoint: run.resume=runs/NAME",
            )
        if run.on_existing == "overwrite_failed":
            rule = "It would remove the run that run.resume=auto goes on with"
            yield "run.on_existing", rule, "Use run.on_existing=refuse, or run.resume=never"
    elif run.resume != "never":
        given = Path(run.resume).expanduser()
        if not given.is_dir():
            rule = f"Neither auto nor never, and no directory (from {Path.cwd()})"
            yield (
                "run.resume",
                rule,
                "Give auto, never, or the directory of a run or of one of its checkpoints",
            )
        elif (
            run.name is not None
            and given.resolve() == (Path(run.root).expanduser() / run.name).resolve()
        ):
            yield (
                "run.resume",
                "It is the directory of this run itself",
                "Use run.resume=auto to go on in it",
            )
