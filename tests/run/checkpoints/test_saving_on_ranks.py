"""A save of two ranks, each in a thread, with small files instead of tensors."""

import errno
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.contracts.commands import Checkpoint
from megatron_rl.mcore.checkpoint import random_state_file
from megatron_rl.run.checkpoints import saving
from megatron_rl.run.checkpoints.manifest import changed_files, list_files, read_manifest
from megatron_rl.run.checkpoints.saving import CheckpointWriter, SaveResult
from megatron_rl.run.checkpoints.store import CheckpointStore
from tests.support.thread_ranks import broadcast_bytes, gather_bytes, run_on_ranks

RANKS = 2
Save = Callable[..., list[Any]]


def make_worker(group: Any) -> Any:
    """A worker without a model. group: the name of the group, and the rank."""
    rank = group[1]
    layout = SimpleNamespace(
        rank=rank, world_size=RANKS, control_group=group, device=torch.device("cpu")
    )
    policy = SimpleNamespace(models=f"models-{rank}")
    return SimpleNamespace(layout=layout, policy=policy, optimizer=None)


def lost_by_rank_1(error: Exception) -> CheckpointException:
    """The error that torch raises on all ranks when rank 1 cannot write."""
    failures: Any = {1: (error, None)}
    return CheckpointException("lost", failures)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


@pytest.fixture
def save(monkeypatch: pytest.MonkeyPatch, store: CheckpointStore) -> Save:
    """Save a checkpoint on all ranks, and return each rank's result or error.

    fail: called by each rank with its number before it writes its tensors.
    """
    this_thread = threading.local()

    def run(step: int, *, keep: int = 2, fail: Callable[[int], None] = lambda _: None) -> list[Any]:
        def write_tensors(tensors: dict[str, bytes], directory: Path, group: Any) -> None:
            fail(group[1])
            for name, data in tensors.items():
                (directory / name).write_bytes(data)

        def gather_tensors(models: Any, *_: Any, **__: Any) -> dict[str, bytes]:
            return {f"{models}.distcp": b"tensors" * (1 + this_thread.rank)}

        monkeypatch.setattr(saving, "gather_bytes", gather_bytes)
        monkeypatch.setattr(saving, "broadcast_bytes", broadcast_bytes)
        monkeypatch.setattr(saving, "gather_tensors", gather_tensors)
        monkeypatch.setattr(saving, "write_tensors", write_tensors)
        monkeypatch.setattr(saving, "random_state", lambda: b"numbers %d" % this_thread.rank)

        def work(group: Any) -> SaveResult | None:
            this_thread.rank = group[1]
            writer = CheckpointWriter(make_worker(group), store, nbytes=0, keep=keep)
            return writer.save(Checkpoint(step, b'{"step": %d}' % step))

        return run_on_ranks(RANKS, work)

    return run


def test_a_checkpoint_holds_the_files_of_every_rank_and_hashes_all(
    save: Save, store: CheckpointStore
) -> None:
    results = save(5)
    checkpoint = store.path(5)
    manifest = read_manifest(checkpoint)
    assert results == [SaveResult(5, nbytes=manifest.nbytes)] * RANKS
    assert list(manifest.files) == list_files(checkpoint)
    assert changed_files(checkpoint, manifest, manifest.files) == []
    assert manifest.step == 5 and json.loads((checkpoint / "state.json").read_text())["step"] == 5
    for rank in range(RANKS):
        assert f"models-{rank}.distcp" in manifest.files
        assert random_state_file(checkpoint, rank).read_bytes() == b"numbers %d" % rank


def test_random_numbers_of_a_thousand_ranks_have_files_of_their_own(tmp_path: Path) -> None:
    assert len({random_state_file(tmp_path, rank) for rank in range(1000)}) == 1000


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left"), "the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
        (lost_by_rank_1(OSError(errno.EDQUOT, "quota")), "the disk quota is used up"),
        (lost_by_rank_1(EOFError("cut off")), "EOFError: cut off"),
    ],
)
def test_a_rank_that_cannot_write_fails_the_save_on_all_ranks(
    save: Save, store: CheckpointStore, error: Exception, reason: str
) -> None:
    assert save(5) == [SaveResult(5, nbytes=read_manifest(store.path(5)).nbytes)] * RANKS

    def fail(rank: int) -> None:
        if rank == 1:
            raise error

    results = save(10, fail=fail)
    assert results[0] == results[1]
    assert results[0].problem.startswith("tensors: ") and reason in results[0].problem
    assert [path.name for path in store.folder.iterdir()] == ["iter_0000005"]


def test_a_checkpoint_has_its_name_once_its_manifest_is_complete(
    save: Save, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    commit = store.commit

    def check_and_commit(step: int) -> Path:
        steps.append(read_manifest(store.staging_path(step)).step)
        return commit(step)

    monkeypatch.setattr(store, "commit", check_and_commit)
    save(5)
    assert steps == [5]


def test_as_many_checkpoints_are_kept_as_run_keep_checkpoints(
    save: Save, store: CheckpointStore
) -> None:
    for step in (5, 10, 15):
        save(step, keep=2)
    assert store.checkpoints() == [store.path(15), store.path(10)]


def test_an_old_checkpoint_that_cannot_be_removed_does_not_fail_the_save(
    save: Save, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(keep: int, *, best_step: int | None) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(store, "prune", refuse)
    assert [result.problem for result in save(5)] == [""] * RANKS
    assert read_manifest(store.path(5)).step == 5
