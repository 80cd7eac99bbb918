"""Directories that are removed with their process, or by the next one."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sglang_bridge.deltas.scratch import open_scratch

CHILD = """
import os
from sglang_bridge.deltas.scratch import open_scratch
with open_scratch() as path:
    (path / "weights").write_text("x")
    print(path, flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files, of this process and its children."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_directory_is_removed_at_the_end(place: Path) -> None:
    with open_scratch() as path:
        assert place in path.parents
        (path / "weights").write_text("x")
        assert path.parent.stat().st_mode & 0o077 == 0
    assert list(place.iterdir()) == []


def test_directories_of_killed_processes_are_removed_and_others_stay(place: Path) -> None:
    foreign = place / "something"
    foreign.mkdir()
    result = subprocess.run(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, check=False
    )
    orphan = Path(result.stdout.strip())
    assert place in orphan.parents
    assert (orphan / "weights").exists()
    with open_scratch() as first, open_scratch() as second:
        assert first != second
        assert first.exists() and second.exists() and foreign.exists()
        assert not orphan.exists()
