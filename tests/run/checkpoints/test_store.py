"""An interrupted save leaves the previous checkpoint complete, and damage is detected."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from megatron_rl.records.durable_files import write_synced
from megatron_rl.run.checkpoints.manifest import (
    DamagedCheckpoint,
    Manifest,
    changed_files,
    hash_file,
    list_files,
    read_manifest,
    write_manifest,
)
from megatron_rl.run.checkpoints.store import CheckpointStore, step_of
from tests.support.checkpoints import flip_bit
from tests.support.disk_log import DiskLog

_CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def save(store: CheckpointStore, step: int, *, keep: int = 1) -> None:
    """Save as a run does, with small files instead of tensors."""
    staging = store.create_staging(step)
    (staging / "rng").mkdir()
    for name in ("tensors", "rng/0", "state.json"):
        write_synced(staging / name, f"{name} of step {step}".encode())
    files = {name: hash_file(staging / name) for name in list_files(staging)}
    write_manifest(staging, Manifest(step=step, files=files))
    store.commit(step)
    store.prune(keep)


def complete_steps(store: CheckpointStore) -> list[int]:
    """The steps of all checkpoints, newest first. Fails when one is damaged."""
    steps = []
    for path in store.checkpoints():
        manifest = read_manifest(path)
        assert changed_files(path, manifest, manifest.files) == []
        assert (path / "state.json").read_text() == f"state.json of step {step_of(path)}"
        steps.append(step_of(path) or 0)
    return steps


def kill_at(change: int, work: Callable[[], None]) -> bool:
    """Run `work` in a child that is killed at a change of the disk.

    Returns False when it makes fewer changes.
    """
    child = os.fork()
    if not child:
        count = 0

        def kill_in_time(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            if event in _CHANGES:
                count += 1
                if count == change:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill_in_time)
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.chaos
def test_a_kill_during_a_save_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    newest_steps = set()
    num_kills = 0
    for change in range(1, 100):
        store = CheckpointStore(tmp_path / str(change))
        save(store, 5)
        if not kill_at(change, lambda store=store: save(store, 10)):  # type: ignore[misc]
            break
        num_kills += 1
        newest_steps.add(complete_steps(store)[0])
        # The resumed run saves as if nothing had happened
        save(store, 15)
        assert complete_steps(store) == [15]
        assert [path.name for path in store.folder.iterdir()] == ["iter_0000015"]
    assert num_kills > 12
    assert newest_steps == {5, 10}


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure there is a complete checkpoint or none."""
    store = CheckpointStore(tmp_path / "checkpoints")
    staging = store.staging_path(5)
    log = DiskLog(monkeypatch)
    save(store, 5)
    commit = [("rename", store.path(5)), ("sync", store.folder)]
    for name in ("tensors", "rng/0", "state.json"):
        files = [("sync", staging / name), ("sync", (staging / name).parent)]
        assert log.is_in_order(*files, *commit)
    assert log.is_in_order(("sync", staging / "manifest.json"), ("sync", staging), *commit)


def test_every_file_is_flushed_when_it_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensors").write_bytes(b"tensors")
    log = DiskLog(monkeypatch)
    assert hash_file(tmp_path / "tensors").nbytes == 7
    assert log.events == [("sync", tmp_path / "tensors")]


def test_a_checkpoint_of_more_steps_than_seven_digits_is_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (9_999_999, 10_000_000):
        save(store, step, keep=2)
    assert complete_steps(store) == [10_000_000, 9_999_999]


def test_the_manifest_does_not_list_itself(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 5)
    assert list_files(store.path(5)) == ["rng/0", "state.json", "tensors"]


def test_a_flipped_bit_is_detected(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 5)
    flip_bit(store.path(5) / "tensors", 3)
    manifest = read_manifest(store.path(5))
    (problem,) = changed_files(store.path(5), manifest, manifest.files)
    assert problem.startswith("tensors has changed")
    assert "sha256" in problem


def test_missing_short_and_unreadable_files_are_detected(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (5, 10, 15):
        save(store, step, keep=3)
    (store.path(5) / "rng/0").unlink()
    with pytest.raises(DamagedCheckpoint, match="rng/0 is missing"):
        read_manifest(store.path(5))
    (store.path(10) / "state.json").write_bytes(b"{}")
    with pytest.raises(DamagedCheckpoint, match=r"state\.json has 2 bytes instead of 21"):
        read_manifest(store.path(10))
    with (store.path(10) / "state.json").open("wb") as file:
        file.write(b"{" * 22)
    with pytest.raises(DamagedCheckpoint, match=r"state\.json has 22 bytes instead of 21"):
        read_manifest(store.path(10))
    (store.path(15) / "manifest.json").write_text("{")
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json cannot be read"):
        read_manifest(store.path(15))


def test_a_file_that_cannot_be_read_has_changed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 5)
    manifest = read_manifest(store.path(5))
    (store.path(5) / "tensors").unlink()
    (problem,) = changed_files(store.path(5), manifest, manifest.files)
    assert problem.startswith("tensors cannot be read")


@pytest.mark.parametrize("version", [0, 2])
def test_a_manifest_of_another_format_is_refused(tmp_path: Path, version: int) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 5)
    manifest = msgspec.structs.replace(read_manifest(store.path(5)), format=version)
    write_manifest(store.path(5), manifest)
    with pytest.raises(DamagedCheckpoint, match=f"has format {version}, but this version reads 1"):
        read_manifest(store.path(5))


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    # Weights in Hugging Face format are in the same folder
    (store.folder / "step-3").mkdir(parents=True)
    for step in (1, 2, 3):
        save(store, step, keep=2)
    assert complete_steps(store) == [3, 2]
    assert (store.folder / "step-3").is_dir()


def test_a_checkpoint_that_is_set_aside_is_not_deleted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (2, 3):
        save(store, step, keep=2)
    target = store.set_aside(store.path(3))
    assert complete_steps(store) == [2]
    assert read_manifest(target).step == 3
    save(store, 3, keep=2)
    store.set_aside(store.path(3))
    assert {path.name for path in store.folder.iterdir()} == {
        "iter_0000002",
        "iter_0000003.damaged-1",
        "iter_0000003.damaged-2",
    }
