"""Where a run's directory is."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

from megatron_rl.config.schema import RunConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def is_valid_run_name(name: str) -> bool:
    """Letters, digits, `.`, `_` and `-`, starting with a letter or digit, no `..`, at most 128 characters."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def resolve_run_dir(run: RunConfig, now: datetime.datetime) -> Path:
    """The absolute path of the run's directory; a run without a name is called after its experiment and `now`.

    Ranks read different clocks: call it on rank 0 and broadcast the result.
    """
    name = run.name if run.name is not None else f"{run.experiment}-{now:%Y%m%d-%H%M%S}"
    return Path(run.root).expanduser().resolve() / name
