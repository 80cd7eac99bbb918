"""A run's directory: where it is, whether it can be made, and the text of the configuration that is kept there."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from omegaconf import OmegaConf

from megatron_rl.config.schema import Configuration, RunSettings


def resolve_run_dir(run: RunSettings, now: datetime.datetime) -> Path:
    """The absolute path of the run's directory; a run without a name is called after its experiment and `now`.

    Ranks read different clocks: call it on rank 0 and broadcast the result.
    """
    name = run.name if run.name is not None else f"{run.experiment}-{now:%Y%m%d-%H%M%S}"
    return Path(run.root).expanduser().resolve() / name


def check_run(run: RunSettings) -> Iterator[tuple[str, str, str]]:
    """Key, rule and remedy of what keeps the directory from being made: the root, or a name that is taken."""
    root = Path(run.root).expanduser()
    blocking = next((parent for parent in (root, *root.parents) if parent.exists()), Path())
    if not run.root:
        yield "run.root", "It names no directory", "Give one, such as run.root=runs"
    elif not blocking.is_dir():
        yield "run.root", f"{blocking} is a file", "Give a directory, or a path to make one at"
    elif not os.access(blocking, os.W_OK | os.X_OK):
        yield "run.root", f"{blocking} is not writable for this user", "Give another directory"
    elif run.name is not None and (root / run.name).exists():
        rule = f"{root / run.name} exists already, and two runs never share a directory"
        yield "run.name", rule, "Choose another name, or move the old run away"


def to_yaml(configuration: Configuration) -> str:
    """Every key with its value, as YAML."""
    return OmegaConf.to_yaml(msgspec.to_builtins(configuration))
