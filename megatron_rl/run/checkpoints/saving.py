"""Saves a checkpoint on all ranks together.

The files are staged, hashed and committed by one rename. If any rank fails, no checkpoint is made.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.contracts.commands import Checkpoint, WaitForSave
from megatron_rl.contracts.run_state import BestState
from megatron_rl.mcore.checkpoint import (
    gather_tensors,
    random_state,
    random_state_file,
    write_tensors,
)
from megatron_rl.mcore.collectives import broadcast_bytes, gather_bytes
from megatron_rl.records.durable_files import write_synced
from megatron_rl.records.write_errors import write_problem
from megatron_rl.run.checkpoints.manifest import (
    FileRecord,
    Manifest,
    hash_file,
    list_files,
    write_manifest,
)
from megatron_rl.run.checkpoints.rollouts import LocalBatch, read_local_batches
from megatron_rl.run.checkpoints.state_file import STATE_NAME
from megatron_rl.run.checkpoints.store import CheckpointStore
from megatron_rl.training.worker import Worker

_MIB = 2**20
# Words in the errors of torch's writer of zip files, which hides their cause
_WRITER_WORDS = ("PytorchStreamWriter", "inline_container.cc")


@dataclass(frozen=True)
class SaveResult:
    """The result of a save.

    problem: the reason why there is no checkpoint; empty after a success. nbytes: its size.
    lacks_rollouts: the reason is that rollouts are gone.
    """

    step: int
    problem: str = ""
    nbytes: int = 0
    lacks_rollouts: bool = False


@dataclass(frozen=True)
class _Snapshot:
    """One rank's part of a checkpoint, in memory."""

    step: int
    state: bytes
    tensors: dict[str, Any]
    random_state: bytes
    best: BestState | None
    batches: list[LocalBatch]


class _SaveFailed(Exception):
    """A rank cannot write its part. Every rank raises this."""


class CheckpointWriter:
    """One rank's part in saving checkpoints.

    nbytes: the expected size of a checkpoint. keep: the number of checkpoints to keep. background:
    a CPU process group of all ranks for saves in the background, None without such saves.
    node: of this rank. writes_rollouts: True on one rank of each node.
    """

    def __init__(
        self,
        worker: Worker,
        store: CheckpointStore,
        *,
        nbytes: int,
        keep: int,
        background: dist.ProcessGroup | None = None,
        node: int = 0,
        writes_rollouts: bool = True,
    ) -> None:
        self._worker = worker
        self._node = node
        self._writes_rollouts = writes_rollouts
        self._store = store
        self._nbytes = nbytes
        self._keep = keep
        self._background = background
        device = worker.layout.device
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="checkpoint", initializer=partial(_select_device, device)
        )
        self._is_first = True
        self._pending_save: Future[SaveResult] | None = None

    def save(self, command: Checkpoint) -> SaveResult | None:
        """Save a checkpoint (a collective). All ranks return the same result.

        Returns None when the save runs in the background; `wait_for_save` returns its result. The
        previous background save must have been waited for. A failed save leaves the earlier
        checkpoints unchanged.
        """
        worker = self._worker
        tensors = gather_tensors(
            worker.policy.models,
            worker.optimizer,
            copy=command.background,
            check_places=self._is_first,
        )
        self._is_first = False
        try:
            batches = self._read_batches(command)
        except _SaveFailed as problem:
            return SaveResult(command.step, str(problem), lacks_rollouts=True)
        snapshot = _Snapshot(
            command.step, command.state, tensors, random_state(), command.best, batches
        )
        if not command.background:
            return self._write(snapshot, worker.layout.control_group)
        assert self._background is not None
        assert self._pending_save is None
        self._pending_save = self._thread.submit(self._write, snapshot, self._background)
        return None

    def wait_for_save(self, command: WaitForSave) -> SaveResult | None:
        """Wait for the save in the background; returns its result (a collective).

        Returns None when there is no such save.
        """
        pending_save = self._pending_save
        self._pending_save = None
        return None if pending_save is None else pending_save.result()

    def _read_batches(self, command: Checkpoint) -> list[LocalBatch]:
        """Read the rollouts of this node (a collective): the next step may release them.

        Raises `_SaveFailed` on all ranks.
        """
        batches: list[LocalBatch] = []

        def read() -> None:
            if self._writes_rollouts:
                batches.extend(read_local_batches(command.batches, self._node))

        if command.batches:
            _run_on_all_ranks(self._worker.layout.control_group, "rollouts", read)
        return batches

    def _write_batches(self, snapshot: _Snapshot, group: dist.ProcessGroup) -> None:
        """Write the rollouts of all nodes (a collective). Raises `_SaveFailed` on all ranks."""
        staging = self._store.staging_path(snapshot.step)
        names: list[list[str]] = []

        def write() -> None:
            names.extend(batch.write(staging, self._node) for batch in snapshot.batches)

        _run_on_all_ranks(group, "rollouts", write)
        names_by_rank = [
            msgspec.msgpack.decode(data, type=list[list[str]])
            for data in gather_bytes(msgspec.msgpack.encode(names), group)
        ]

        def complete() -> None:
            if self._worker.layout.rank != 0:
                return
            for index, batch in enumerate(snapshot.batches):
                batch.complete(
                    staging, [name for rank in names_by_rank if rank for name in rank[index]]
                )

        _run_on_all_ranks(group, "rollouts", complete)

    def _write(self, snapshot: _Snapshot, group: dist.ProcessGroup) -> SaveResult:
        rank = self._worker.layout.rank
        step = snapshot.step
        staging = self._store.staging_path(step)

        def make_staging() -> None:
            if rank == 0:
                self._make_staging(step)

        def write_tensor_files() -> None:
            write_tensors(snapshot.tensors, staging, group)

        def write_random_state() -> None:
            file = random_state_file(staging, rank)
            file.parent.mkdir(exist_ok=True)
            write_synced(file, snapshot.random_state)

        def write_state() -> None:
            if rank == 0:
                write_synced(staging / STATE_NAME, snapshot.state)

        try:
            _run_on_all_ranks(group, "", make_staging)
            _run_on_all_ranks(group, "tensors", write_tensor_files)
            _run_on_all_ranks(group, "random numbers", write_random_state)
            _run_on_all_ranks(group, STATE_NAME, write_state)
            self._write_batches(snapshot, group)
            return SaveResult(step, nbytes=self._commit(step, group, snapshot.best))
        except _SaveFailed as problem:
            if rank == 0:
                self._store.discard_staging(step)
            return SaveResult(step, str(problem))

    def _commit(self, step: int, group: dist.ProcessGroup, best: BestState | None) -> int:
        """Hash the staged files and commit them. Returns the size of the checkpoint in bytes."""
        manifest = Manifest(step=step, files=self._hash_staged_files(step, group))

        def commit() -> None:
            if self._worker.layout.rank != 0:
                return
            write_manifest(self._store.staging_path(step), manifest)
            self._store.commit(step)
            if best is not None:
                self._store.set_best(best)  # before its predecessor may be removed
            # An old checkpoint that cannot be removed does not harm the new one
            with contextlib.suppress(OSError):
                self._store.prune(self._keep, best_step=None if best is None else best.step)

        _run_on_all_ranks(group, "manifest", commit)
        return manifest.nbytes

    def _hash_staged_files(self, step: int, group: dist.ProcessGroup) -> dict[str, FileRecord]:
        """Hash all staged files, a share of them on each rank. Returns all on every rank."""
        layout = self._worker.layout
        staging = self._store.staging_path(step)
        message = msgspec.msgpack.encode(list_files(staging)) if layout.rank == 0 else None
        names = msgspec.msgpack.decode(broadcast_bytes(message, group), type=list[str])
        records: dict[str, FileRecord] = {}

        def hash_share() -> None:
            for name in names[layout.rank :: layout.world_size]:
                records[name] = hash_file(staging / name)

        _run_on_all_ranks(group, "hashes", hash_share)
        all_records: dict[str, FileRecord] = {}
        for data in gather_bytes(msgspec.msgpack.encode(records), group):
            all_records |= msgspec.msgpack.decode(data, type=dict[str, FileRecord])
        return dict(sorted(all_records.items()))

    def _make_staging(self, step: int) -> None:
        self._store.create_staging(step)
        free = shutil.disk_usage(self._store.folder).free
        if free < self._nbytes:
            raise OSError(
                f"{free / _MIB:,.0f} MiB are free, and a checkpoint takes "
                f"{self._nbytes / _MIB:,.0f} MiB"
            )


def _select_device(device: torch.device) -> None:
    """Select the GPU of this rank in this thread.

    torch's writer waits for the thread's GPU, which allocates memory there. A new thread has GPU 0.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _run_on_all_ranks(group: dist.ProcessGroup, task: str, action: Callable[[], None]) -> None:
    """Run an action on every rank and exchange its errors (a collective).

    Raises `_SaveFailed` on all ranks when one of them cannot write.
    """
    problem = ""
    try:
        action()
    except (Exception, CheckpointException) as error:
        problem = _describe_problem(error)
        if not problem:
            raise
    problems = [data.decode() for data in gather_bytes(problem.encode(), group)]
    text = _join_unique(problems)
    if text:
        raise _SaveFailed(f"{task}: {text}" if task else text)


def _describe_problem(error: BaseException) -> str:
    """The reason why a rank cannot write.

    Empty for errors that have another cause: a bug, or the end of another rank.
    """
    if isinstance(error, CheckpointException):
        return _describe_rank_errors(error.failures)
    problem = write_problem(error)
    if problem is not None:
        return problem
    if isinstance(error, OSError):
        return str(error)
    if any(word in str(error) for word in _WRITER_WORDS):
        return (
            "the disk is full, over quota or defective: torch could not write a complete file "
            f"({error})"
        )
    return ""


def _describe_rank_errors(failures: Mapping[int, Any]) -> str:
    """failures: by rank, the exception and its traceback, as torch's `CheckpointException` has."""
    problems = []
    for error, _ in failures.values():
        problems.append(_describe_problem(error) or f"{type(error).__name__}: {error}")
    return _join_unique(problems)


def _join_unique(problems: list[str]) -> str:
    """Join the problems that are not empty, without repeats."""
    return "; ".join(dict.fromkeys(filter(None, problems)))
