"""Files that are on the disk before a run relies on them."""

from pathlib import Path

import pytest

from megatron_rl.records.durable_files import sync_folder, write_synced
from tests.support.disk_log import DiskLog


def test_a_file_is_flushed_with_all_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = DiskLog(monkeypatch)
    write_synced(tmp_path / "a", b"seven b")
    assert log.events == [("sync", tmp_path / "a")]
    assert log.sizes == {tmp_path / "a": 7}, "the bytes had left this process"


def test_the_names_in_a_folder_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = DiskLog(monkeypatch)
    sync_folder(tmp_path)
    assert log.events == [("sync", tmp_path)]
