"""The run's name and place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.refusal import Refusal
from megatron_rl.config.run_dir import is_valid_run_name
from megatron_rl.config.schema import RunConfig


def check_run(run: RunConfig) -> Iterator[Refusal]:
    """The name is a plain directory name that is not taken; the root can hold directories."""
    for key, name in (("run.name", run.name), ("run.experiment", run.experiment)):
        if name is not None and not is_valid_run_name(name):
            rule = "A run's name has letters, digits, '.', '_' and '-' only, starts with a letter or digit, has no '..'"
            yield Refusal(key, name, rule, "Choose such a name; run.root says where the directory is made")
    if not run.root:
        yield Refusal("run.root", "''", "It names no directory", "Give one, such as run.root=runs")
        return
    root = Path(run.root).expanduser()
    blocking = next((parent for parent in (root, *root.parents) if parent.exists()), None)
    if blocking is not None and not blocking.is_dir():
        yield Refusal("run.root", run.root, f"{blocking} is a file", "Give a directory, or a path to make one at")
    elif blocking is not None and not os.access(root if root.exists() else blocking, os.W_OK | os.X_OK):
        yield Refusal("run.root", run.root, f"{blocking} is not writable for this user", "Give another directory")
    elif run.name is not None and is_valid_run_name(run.name) and (root / run.name).exists():
        rule = f"{root / run.name} exists already, and two runs never share a directory"
        yield Refusal("run.name", run.name, rule, "Choose another name, or move the old run away")
