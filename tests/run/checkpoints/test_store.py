"""A save may end anywhere: what was whole before it is whole after it, and what is not whole is
told.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.records.durable_files import write_synced
from megatron_rl.run.checkpoints.manifest import (
    DamagedCheckpoint,
    Manifest,
    changed_files,
    list_files,
    read_manifest,
    hash_file,
    write_manifest,
)
from megatron_rl.run.checkpoints.store import CheckpointStore, step_of

_CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def save(shelf: CheckpointStore, step: int, *, keep: int = 1) -> None:
    """What a run does, with small files in the place of tensors."""
    staged = shelf.stage(step)
    (staged / "rng").mkdir()
    for name in ("tensors", "rng/0", "state.json"):
        write_synced(staged / name, f"{name} of step {step}".encode())
    files = {name: hash_file(staged / name) for name in list_files(staged)}
    write_manifest(staged, Manifest(step=step, files=files))
    shelf.commit(step)
    shelf.prune(keep)


def whole(shelf: CheckpointStore) -> list[int]:
    """The steps of all whole checkpoints, newest first."""
    found = []
    for path in shelf.saved():
        manifest = read_manifest(path)
        assert changed_files(path, manifest, manifest.files) == []
        assert (path / "state.json").read_text() == f"state.json of step {step_of(path)}"
        found.append(step_of(path) or 0)
    return found


def killed_at(point: int, work: Callable[[], None]) -> bool:
    """Run `work` in a child that is killed at its n-th change of the disk; False where it has
    fewer.
    """
    child = os.fork()
    if not child:
        count = 0

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            if event in _CHANGES:
                count += 1
                if count == point:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_a_kill_at_any_point_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    points, seen = 0, set()
    for point in range(1, 100):
        shelf = CheckpointStore(tmp_path / str(point))
        save(shelf, 5)
        if not killed_at(point, lambda shelf=shelf: save(shelf, 10)):  # type: ignore[misc]
            break
        points += 1
        newest = whole(shelf)[0]
        seen.add(newest)
        save(shelf, 15)  # the run that goes on saves as if nothing had been
        assert whole(shelf) == [15] and [path.name for path in shelf.folder.iterdir()] == [
            "iter_0000015"
        ]
    assert points > 12 and seen == {5, 10}


def test_a_flipped_bit_a_missing_file_and_a_short_one_are_named(tmp_path: Path) -> None:
    shelf = CheckpointStore(tmp_path / "checkpoints")
    for step in (5, 10, 15, 20):
        save(shelf, step, keep=4)
    flipped, missing, short, bare = shelf.saved()
    data = bytearray((flipped / "tensors").read_bytes())
    data[3] ^= 1
    (flipped / "tensors").write_bytes(data)
    manifest = read_manifest(flipped)
    assert changed_files(flipped, manifest, manifest.files) == [
        "tensors is not what was saved (its sha256 differs)"
    ]
    (missing / "rng/0").unlink()
    with pytest.raises(DamagedCheckpoint, match="rng/0 is missing"):
        read_manifest(missing)
    (short / "state.json").write_bytes(b"{}")
    with pytest.raises(DamagedCheckpoint, match=r"state\.json has 2 bytes instead of 21"):
        read_manifest(short)
    (bare / "manifest.json").write_text("{")
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json cannot be read"):
        read_manifest(bare)


def test_the_newest_are_kept_and_damaged_ones_only_step_aside(tmp_path: Path) -> None:
    shelf = CheckpointStore(tmp_path / "checkpoints")
    (shelf.folder / "step-3").mkdir(parents=True)  # weights in Hugging Face format lie beside them
    for step in (1, 2, 3):
        save(shelf, step, keep=2)
    assert whole(shelf) == [3, 2]
    aside = shelf.set_aside(shelf.path(3))
    assert whole(shelf) == [2] and read_manifest(aside).step == 3
    save(shelf, 3, keep=2)
    shelf.set_aside(shelf.path(3))
    assert {path.name for path in shelf.folder.iterdir()} == {
        "step-3",
        "iter_0000002",
        "iter_0000003.damaged-1",
        "iter_0000003.damaged-2",
    }
