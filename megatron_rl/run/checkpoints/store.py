"""Stores the checkpoints of one run.

All ranks write the files of a new checkpoint into a staging folder. Rank 0 commits it with one
rename. Invariant: if a save is interrupted, the previous checkpoint is still complete
(tests/run/checkpoints/test_store.py::test_a_kill_during_a_save_leaves_a_complete_checkpoint).
"""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

import msgspec

from megatron_rl.contracts.run_state import BestState
from megatron_rl.records.durable_files import sync_folder, write_synced

# Megatron's name for a checkpoint
_NAME = re.compile(r"iter_(\d{7,})")
_STAGING_SUFFIX = ".staged"
_REMOVAL_SUFFIX = ".leaving"
_DAMAGE_SUFFIX = ".damaged"
_BEST = "best"


def step_of(checkpoint: Path) -> int | None:
    """The step after which a checkpoint was saved; None for other files."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


class CheckpointStore:
    """The folder `checkpoints/` of a run.

    Rank 0 alone creates, commits and removes checkpoints. Every rank writes its files into the
    staging folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """The path of the checkpoint after `step`."""
        return self.folder / f"iter_{step:07d}"

    def staging_path(self, step: int) -> Path:
        """The path of a checkpoint until it is committed."""
        return self.path(step).with_suffix(_STAGING_SUFFIX)

    def checkpoints(self) -> list[Path]:
        """All committed checkpoints, the newest first. Some may have been damaged since."""
        if not self.folder.is_dir():
            return []
        path_by_step = {step_of(path): path for path in self.folder.iterdir()}
        steps = [step for step in path_by_step if step is not None]
        return [path_by_step[step] for step in sorted(steps, reverse=True)]

    def create_staging(self, step: int) -> Path:
        """Make an empty folder for the files of a checkpoint.

        Remains of an interrupted save are removed.
        """
        self.folder.mkdir(exist_ok=True)
        for suffix in (_STAGING_SUFFIX, _REMOVAL_SUFFIX):
            for remains in list(self.folder.glob(f"iter_*{suffix}")):
                shutil.rmtree(remains)
        staging = self.staging_path(step)
        staging.mkdir()
        return staging

    def discard_staging(self, step: int) -> None:
        """Remove the staging folder of a checkpoint that will not be committed."""
        shutil.rmtree(self.staging_path(step), ignore_errors=True)

    def commit(self, step: int) -> Path:
        """Rename the staging folder. From then on it is the newest checkpoint."""
        checkpoint = self.path(step)
        self.staging_path(step).rename(checkpoint)
        sync_folder(self.folder)
        return checkpoint

    @property
    def best_link(self) -> Path:
        """The link to the best checkpoint."""
        return self.folder / _BEST

    def set_best(self, best: BestState | None) -> None:
        """Let the link `best` and the file best.json of the run name a checkpoint, or none.

        On a file system without symbolic links, only best.json names it.
        """
        record = self.folder.parent / f"{_BEST}.json"
        if best is None:
            record.unlink(missing_ok=True)
            self.best_link.unlink(missing_ok=True)
            return
        name = self.path(best.step).name
        new_link = self.folder / f"{_BEST}{_STAGING_SUFFIX}"
        new_link.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            new_link.symlink_to(name)
            new_link.rename(self.best_link)
        sync_folder(self.folder)
        content = msgspec.structs.asdict(best) | {"checkpoint": f"{self.folder.name}/{name}"}
        write_synced(record, msgspec.json.format(msgspec.json.encode(content)) + b"\n")

    def prune(self, keep: int, *, best_step: int | None = None) -> None:
        """Remove all checkpoints except the newest `keep` and the checkpoint of `best_step`.

        A checkpoint is renamed first, so that a partial one never has the name of a complete one.
        """
        for checkpoint in self.checkpoints()[keep:]:
            if step_of(checkpoint) == best_step:
                continue
            trash = checkpoint.with_suffix(_REMOVAL_SUFFIX)
            checkpoint.rename(trash)
            shutil.rmtree(trash)

    def set_aside(self, checkpoint: Path) -> Path:
        """Rename a checkpoint that cannot be used, so that its name is free. Nothing is deleted."""
        for number in range(1, 10_000):
            target = checkpoint.with_suffix(f"{_DAMAGE_SUFFIX}-{number}")
            if not target.exists():
                checkpoint.rename(target)
                sync_folder(self.folder)
                return target
        raise FileExistsError(f"{self.folder} holds thousands of damaged checkpoints")
