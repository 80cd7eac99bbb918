"""Names of the files of samples in the directory of a run."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

_FOLDER = "samples"
_NAME = re.compile(r"step-(\d+)\.parquet")


def samples_file(run: Path, step: int) -> Path:
    """Return the file of a step's samples."""
    return run / _FOLDER / f"step-{step:07d}.parquet"


def sample_steps(run: Path) -> list[int]:
    """Return the steps that have samples, ascending."""
    names = (file.name for file in (run / _FOLDER).glob("step-*.parquet"))
    matches = map(_NAME.fullmatch, names)
    return sorted(int(match[1]) for match in matches if match is not None)


def move_samples(run: Path, archive: Path, *, after_step: int) -> None:
    """Move the samples of later steps to the folder `samples` of `archive`.

    Files that cannot be moved stay, because no run should end for them. The steps that train again
    replace them.
    """
    target = archive / _FOLDER
    for step in sample_steps(run):
        file = samples_file(run, step)
        if step > after_step:
            with contextlib.suppress(OSError):
                target.mkdir(exist_ok=True)
                file.rename(target / file.name)
