"""exit.json is whole or absent, and the first cause stays."""

import errno
import json
import os
from pathlib import Path

import pytest

from megatron_rl.records.exit_record import read_exit_record, reserve_exit_record, write_exit_record


def test_the_first_cause_stays(tmp_path: Path) -> None:
    reserve_exit_record(tmp_path)
    assert write_exit_record(tmp_path, 4, "the engine died")
    assert not write_exit_record(tmp_path, 7, "another rank is gone")
    record = json.loads((tmp_path / "exit.json").read_text())
    assert (record["code"], record["reason"]) == (4, "the engine died")
    assert [path.name for path in tmp_path.iterdir()] == ["exit.json"]


def test_it_needs_no_reserve_and_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", no_links)
    assert write_exit_record(tmp_path, 143, "told to stop")
    assert not write_exit_record(tmp_path, 1, "second")
    assert (record := read_exit_record(tmp_path)) is not None and record.code == 143


@pytest.mark.parametrize("reason", ["x" * 200_000, 'quote" and\nnew line ' * 9_000, "ж" * 90_000])
def test_a_full_disk_has_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """What is written lies within blocks that exist already: the file never grows."""
    reserve_exit_record(tmp_path)
    room = (tmp_path / ".exit-reserve").stat().st_size
    real = os.write

    def write(descriptor: int, data: memoryview) -> int:
        if os.lseek(descriptor, 0, os.SEEK_CUR) + len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    assert write_exit_record(tmp_path, 8, reason)
    record = read_exit_record(tmp_path)
    assert (
        record is not None
        and record.code == 8
        and reason.startswith(record.reason)
        and len(record.reason) > 10_000
    )


def test_a_disk_without_room_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write_exit_record(tmp_path, 8, "the disk is full")
    assert list(tmp_path.iterdir()) == []
    assert read_exit_record(tmp_path) is None


def test_what_is_no_record_reads_as_none(tmp_path: Path) -> None:
    (tmp_path / "exit.json").write_text("{")
    assert read_exit_record(tmp_path) is None
