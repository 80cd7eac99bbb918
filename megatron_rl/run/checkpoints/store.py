"""The checkpoints of one run: each is staged beside the others and committed by one rename.

Invariant: whenever a save is cut short, the newest checkpoint before it is still whole
(tests/run/checkpoints/test_store.py::test_a_kill_at_any_point_of_a_save_leaves_a_whole_checkpoint).
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from megatron_rl.records.durable_files import sync_folder

_NAME = re.compile(r"iter_(\d{7,})")  # Megatron's name for a checkpoint
_STAGED, _LEAVING, _DAMAGED = ".staged", ".leaving", ".damaged"


def step_of(checkpoint: Path) -> int | None:
    """The step after which a checkpoint was saved; None for anything else."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


class CheckpointStore:
    """The folder `checkpoints/` of a run. Rank 0 alone changes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        return self.folder / f"iter_{step:07d}"

    def staged(self, step: int) -> Path:
        """Where a checkpoint lies until it is whole."""
        return self.path(step).with_suffix(_STAGED)

    def saved(self) -> list[Path]:
        """Everything that was committed, newest first, whole or damaged since."""
        steps = (
            {path: step_of(path) for path in self.folder.iterdir()} if self.folder.is_dir() else {}
        )
        return sorted(
            (path for path in steps if steps[path] is not None),
            key=lambda path: -(steps[path] or 0),
        )

    def stage(self, step: int) -> Path:
        """An empty folder for the files of a checkpoint.

        What a save that was cut short has left is removed.
        """
        self.folder.mkdir(exist_ok=True)
        for left in (*self.folder.glob(f"iter_*{_STAGED}"), *self.folder.glob(f"iter_*{_LEAVING}")):
            shutil.rmtree(left)
        staged = self.staged(step)
        staged.mkdir()
        return staged

    def discard(self, step: int) -> None:
        """Remove what was staged and will not be committed."""
        shutil.rmtree(self.staged(step), ignore_errors=True)

    def commit(self, step: int) -> Path:
        """Give the staged files their name: from now on they are the newest checkpoint."""
        target = self.path(step)
        target.with_suffix(_STAGED).rename(target)
        sync_folder(self.folder)
        return target

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep`; half of one never stands under the name of a whole one."""
        for old in self.saved()[keep:]:
            leaving = old.with_suffix(_LEAVING)
            old.rename(leaving)
            shutil.rmtree(leaving)

    def set_aside(self, checkpoint: Path) -> Path:
        """Take a checkpoint that cannot be used out of the way of the next one with its name;
        nothing is deleted.
        """
        for number in range(1, 10_000):
            aside = checkpoint.with_suffix(f"{_DAMAGED}-{number}")
            if not aside.exists():
                return checkpoint.rename(aside)
        raise FileExistsError(f"{self.folder} holds thousands of damaged checkpoints")
