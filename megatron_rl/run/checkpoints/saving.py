"""How a checkpoint is saved by all ranks together: staged, hashed, committed by one rename, or
nothing at all.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.contracts.commands import Checkpoint, WaitForSave
from megatron_rl.mcore.checkpoint import (
    gather_tensors,
    random_state,
    random_state_file,
    write_tensors,
)
from megatron_rl.records.durable_files import write_synced
from megatron_rl.records.write_errors import write_problem
from megatron_rl.run.checkpoints.manifest import (
    FileRecord,
    Manifest,
    list_files,
    hash_file,
    write_manifest,
)
from megatron_rl.run.checkpoints.state_file import NAME as STATE
from megatron_rl.run.checkpoints.store import CheckpointStore
from megatron_rl.training.collectives import broadcast_bytes, gather_bytes
from megatron_rl.training.worker import Worker

_MIB = 2**20
_WRITER_WORDS = (
    "PytorchStreamWriter",
    "inline_container.cc",
)  # torch's writer of zip files hides the cause


@dataclass(frozen=True)
class SaveResult:
    """What became of a save.

    problem: why there is no checkpoint; empty where there is one, of `nbytes`.
    """

    step: int
    problem: str = ""
    nbytes: int = 0


@dataclass(frozen=True)
class _Snapshot:
    """A rank's part of a checkpoint, in memory."""

    step: int
    state: bytes
    tensors: dict[str, Any]
    random: bytes


class _NotSaved(Exception):
    """Some rank cannot write; every rank raises it."""


class CheckpointWriter:
    """One rank's part in saving. nbytes: what a checkpoint is expected to take; keep: how many
    stay.

    background: a process group over all ranks, on the CPU, for what is written while others are in
    use.
    """

    def __init__(
        self,
        worker: Worker,
        shelf: CheckpointStore,
        *,
        nbytes: int,
        keep: int,
        background: dist.ProcessGroup | None = None,
    ) -> None:
        self._worker, self._shelf = worker, shelf
        self._nbytes, self._keep = nbytes, keep
        self._background = background
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._going_on: Future[SaveResult] | None = None

    def save(self, command: Checkpoint) -> SaveResult | None:
        """Collective, with the same outcome on all ranks; None: it is written in the background,
        `settle` tells.

        A failure to write leaves the checkpoints as they were. Whatever was going on must be
        settled before.
        """
        worker, layout = self._worker, self._worker.layout
        tensors = gather_tensors(worker.policy.models, worker.optimizer, copy=command.background)
        snapshot = _Snapshot(command.step, command.state, tensors, random_state())
        if not command.background:
            return self._write(snapshot, layout.control_group)
        assert self._background is not None and self._going_on is None
        self._going_on = self._thread.submit(self._write, snapshot, self._background)
        return None

    def settle(self, command: WaitForSave) -> SaveResult | None:
        """What became of the save in the background, if there is one; it is over when this returns
        (a collective).
        """
        going_on, self._going_on = self._going_on, None
        return going_on.result() if going_on is not None else None

    def _write(self, snapshot: _Snapshot, group: dist.ProcessGroup) -> SaveResult:
        rank, step = self._worker.layout.rank, snapshot.step
        staged = self._shelf.staged(step)
        try:
            _together(group, "", lambda: self._make_room(step) if rank == 0 else None)
            _together(group, "tensors", lambda: write_tensors(snapshot.tensors, staged, group))
            _together(
                group,
                "random numbers",
                lambda: _write_file(random_state_file(staged, rank), snapshot.random),
            )
            _together(
                group,
                STATE,
                lambda: write_synced(staged / STATE, snapshot.state) if rank == 0 else None,
            )
            return SaveResult(step, nbytes=self._commit(step, group))
        except _NotSaved as problem:
            if rank == 0:
                self._shelf.discard(step)
            return SaveResult(step, str(problem))

    def _commit(self, step: int, group: dist.ProcessGroup) -> int:
        """Hash what was written, each rank its share of the files, and give it its name.

        Returns its size in bytes.
        """
        layout, staged = self._worker.layout, self._shelf.staged(step)
        mine = msgspec.msgpack.encode(list_files(staged)) if layout.rank == 0 else None
        names = msgspec.msgpack.decode(broadcast_bytes(mine, group), type=list[str])
        found: dict[str, FileRecord] = {}
        share = names[layout.rank :: layout.world_size]
        _together(
            group,
            "hashes",
            lambda: found.update({name: hash_file(staged / name) for name in share}),
        )
        everyones = gather_bytes(msgspec.msgpack.encode(found), group)
        parts = [msgspec.msgpack.decode(data, type=dict[str, FileRecord]) for data in everyones]
        files = dict(sorted((name, record) for part in parts for name, record in part.items()))
        manifest = Manifest(step=step, files=files)

        def commit() -> None:
            write_manifest(staged, manifest)
            self._shelf.commit(step)
            with contextlib.suppress(
                OSError
            ):  # an old one that cannot be removed takes nothing from the new one
                self._shelf.prune(self._keep)

        _together(group, "manifest", lambda: commit() if layout.rank == 0 else None)
        return manifest.nbytes

    def _make_room(self, step: int) -> None:
        self._shelf.stage(step)
        if (free := shutil.disk_usage(self._shelf.folder).free) < self._nbytes:
            raise OSError(
                f"{free / _MIB:,.0f} MiB are free, and a checkpoint takes {self._nbytes / _MIB:,.0f} MiB"
            )


def _write_file(file: Path, data: bytes) -> None:
    file.parent.mkdir(exist_ok=True)
    write_synced(file, data)


def _together(group: dist.ProcessGroup, what: str, action: Callable[[], None]) -> None:
    """Let every rank act, and learn of each other's failures. Raises `_NotSaved` on all."""
    problem = ""
    try:
        action()
    except (Exception, CheckpointException) as error:
        problem = _problem(error)
        if not problem:
            raise
    everyones = [data.decode() for data in gather_bytes(problem.encode(), group)]
    said = "; ".join(dict.fromkeys(filter(None, everyones)))
    if said:
        raise _NotSaved(f"{what}: {said}" if what else said)


def _problem(error: BaseException) -> str:
    """What keeps a rank from writing; empty for a mistake of the program, and for the end of
    another rank.
    """
    if isinstance(error, CheckpointException):
        found = [
            _problem(inner) or f"{type(inner).__name__}: {inner}"
            for inner, _ in error.failures.values()
        ]
        return "; ".join(dict.fromkeys(found))
    if (known := write_problem(error)) is not None:
        return known
    if isinstance(error, OSError):
        return str(error)
    if any(word in str(error) for word in _WRITER_WORDS):
        return f"the disk is full, over quota or does not work: torch could not write all of a file ({error})"
    return ""
