"""How a checkpoint is saved by all ranks together: staged, hashed, committed by one rename, or nothing at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.contracts.commands import Checkpoint
from megatron_rl.mcore.checkpoint import random_state_file, save_random_state, save_tensors
from megatron_rl.records.manifest import FileRecord, Manifest, files_of, record_of, write_manifest, write_synced
from megatron_rl.records.run_state import NAME as STATE
from megatron_rl.records.shelf import Shelf
from megatron_rl.records.writing import writing_problem
from megatron_rl.training.collectives import broadcast_bytes, gather_bytes
from megatron_rl.training.worker import Worker

_MIB = 2**20
_WRITER_WORDS = (
    "PytorchStreamWriter",
    "inline_container.cc",
)  # torch's writer of zip files hides the cause


@dataclass(frozen=True)
class SavedCheckpoint:
    """What became of a save. problem: why there is no checkpoint; empty where there is one, of `nbytes`."""

    problem: str
    nbytes: int = 0


class _NotSaved(Exception):
    """Some rank cannot write; every rank raises it."""


@dataclass(frozen=True)
class Checkpoints:
    """One rank's part in saving. nbytes: what a checkpoint is expected to take; keep: how many stay."""

    worker: Worker
    shelf: Shelf
    nbytes: int
    keep: int

    def save(self, command: Checkpoint) -> SavedCheckpoint:
        """Collective, with the same outcome on all ranks. A failure to write leaves the checkpoints as they were."""
        try:
            self._write(command)
            return SavedCheckpoint("", self._commit(command.step))
        except _NotSaved as problem:
            if self.worker.layout.rank == 0:
                self.shelf.discard(command.step)
            return SavedCheckpoint(str(problem))

    def _write(self, command: Checkpoint) -> None:
        """Every file but the manifest."""
        worker, layout, staged = self.worker, self.worker.layout, self.shelf.staged(command.step)
        self._together("", lambda: self._make_room(command.step), on_rank_0=True)
        self._together(
            "tensors", lambda: save_tensors(worker.policy.models, worker.optimizer, staged, layout.control_group)
        )
        self._together("random numbers", lambda: save_random_state(random_state_file(staged, layout.rank)))
        self._together(STATE, lambda: write_synced(staged / STATE, command.state), on_rank_0=True)

    def _commit(self, step: int) -> int:
        """Hash what was written, each rank its share of the files, and give it its name. Returns its size in bytes."""
        layout, staged = self.worker.layout, self.shelf.staged(step)
        found: dict[str, FileRecord] = {}
        names = self._names(staged)[layout.rank :: layout.world_size]
        self._together("hashes", lambda: found.update({name: record_of(staged / name) for name in names}))
        everyones = gather_bytes(msgspec.msgpack.encode(found), layout.control_group)
        parts = [msgspec.msgpack.decode(data, type=dict[str, FileRecord]) for data in everyones]
        files = dict(sorted((name, record) for part in parts for name, record in part.items()))
        manifest = Manifest(step=step, world_size=layout.world_size, files=files)

        def commit() -> None:
            write_manifest(staged, manifest)
            self.shelf.commit(step)
            with contextlib.suppress(OSError):  # an old one that cannot be removed takes nothing from the new one
                self.shelf.prune(self.keep)

        self._together("manifest", commit, on_rank_0=True)
        return manifest.nbytes

    def _names(self, staged: Path) -> list[str]:
        """The staged files as rank 0 sees them."""
        layout = self.worker.layout
        mine = msgspec.msgpack.encode(files_of(staged)) if layout.rank == 0 else None
        return msgspec.msgpack.decode(broadcast_bytes(mine, layout.control_group), type=list[str])

    def _make_room(self, step: int) -> None:
        self.shelf.stage(step)
        if (free := shutil.disk_usage(self.shelf.folder).free) < self.nbytes:
            raise OSError(f"{free / _MIB:,.0f} MiB are free, and a checkpoint takes {self.nbytes / _MIB:,.0f} MiB")

    def _together(self, what: str, action: Callable[[], None], *, on_rank_0: bool = False) -> None:
        """Let every rank act, or rank 0 alone, and learn of each other's failures. Raises `_NotSaved` on all."""
        layout, problem = self.worker.layout, ""
        if layout.rank == 0 or not on_rank_0:
            try:
                action()
            except (Exception, CheckpointException) as error:
                problem = _problem(error)
                if not problem:
                    raise
        everyones = [data.decode() for data in gather_bytes(problem.encode(), layout.control_group)]
        said = list(dict.fromkeys(filter(None, everyones)))
        if said:
            raise _NotSaved(f"{what}: {'; '.join(said)}" if what else "; ".join(said))


def _problem(error: BaseException) -> str:
    """What keeps a rank from writing; empty for a mistake of the program, and for the end of another rank."""
    if isinstance(error, CheckpointException):
        found = [_problem(inner) or f"{type(inner).__name__}: {inner}" for inner, _ in error.failures.values()]
        return "; ".join(dict.fromkeys(found))
    if (known := writing_problem(error)) is not None:
        return known
    if isinstance(error, OSError):
        return str(error)
    if any(word in str(error) for word in _WRITER_WORDS):
        return f"the disk is full, over quota or does not work: torch could not write all of a file ({error})"
    return ""
