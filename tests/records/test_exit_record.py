"""exit.json is complete or missing, and the first cause stays."""

import datetime
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
    assert datetime.datetime.fromisoformat(record["ended"]).tzinfo == datetime.UTC
    assert [path.name for path in tmp_path.iterdir()] == ["exit.json"]


def test_a_log_is_a_field_of_its_own(tmp_path: Path) -> None:
    for name, log_tail in (("with", "line 1\nline 2"), ("without", "")):
        (tmp_path / name).mkdir()
        assert write_exit_record(tmp_path / name, 4, "the engine died", log_tail)
        record = read_exit_record(tmp_path / name)
        assert record is not None and record.log_tail == log_tail
    content = json.loads((tmp_path / "with/exit.json").read_text())
    assert list(content) == ["code", "reason", "ended", "log_tail"]
    assert "log_tail" not in json.loads((tmp_path / "without/exit.json").read_text())


@pytest.mark.parametrize("character", ["x", '"', "\x1b", "ж"])
def test_a_long_log_is_cut_before_the_reason_is(tmp_path: Path, character: str) -> None:
    reserve_exit_record(tmp_path)
    room = (tmp_path / ".exit-reserve").stat().st_size
    log_tail = character * 100_000 + "the end"
    assert write_exit_record(tmp_path, 4, "the engine died", log_tail)
    assert (tmp_path / "exit.json").stat().st_size <= room
    record = read_exit_record(tmp_path)
    assert record is not None and record.reason == "the engine died"
    assert record.log_tail.endswith("the end") and len(record.log_tail) > 2000


def test_a_record_needs_neither_a_reserve_nor_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", no_links)
    assert write_exit_record(tmp_path, 143, "the run was stopped")
    assert not write_exit_record(tmp_path, 1, "second")
    record = read_exit_record(tmp_path)
    assert record is not None
    assert record.code == 143


@pytest.mark.parametrize("reason", ["x" * 200_000, 'quote" and\nnew line ' * 9_000, "ж" * 90_000])
def test_a_full_disk_has_room_for_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """The record is written into the reserved blocks: the file never grows."""
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
    assert record is not None
    assert record.code == 8
    assert reason.startswith(record.reason)
    assert len(record.reason) > 10_000


def test_a_disk_without_room_leaves_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write_exit_record(tmp_path, 8, "the disk is full")
    assert list(tmp_path.iterdir()) == []
    assert read_exit_record(tmp_path) is None


def test_a_file_that_is_no_record_reads_as_none(tmp_path: Path) -> None:
    (tmp_path / "exit.json").write_text("{")
    assert read_exit_record(tmp_path) is None
