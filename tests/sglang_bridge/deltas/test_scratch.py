"""Directories that are removed with their process, or by the next one."""

import os
import subprocess
import sys
from pathlib import Path

from sglang_bridge.deltas.scratch import open_scratch

CHILD = """
import os, sys
from pathlib import Path
from sglang_bridge.deltas.scratch import open_scratch
with open_scratch(Path(sys.argv[1])) as path:
    (path / "weights").write_text("x")
    print(path, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_a_directory_is_removed_at_the_end(tmp_path: Path) -> None:
    with open_scratch(tmp_path / "new") as path:
        (path / "weights").write_text("x")
        assert path.parent.stat().st_mode & 0o077 == 0
    assert list((tmp_path / "new").iterdir()) == []


def test_directories_of_killed_processes_are_removed_and_others_stay(tmp_path: Path) -> None:
    foreign = tmp_path / "something"
    foreign.mkdir()
    result = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=False
    )
    orphan = Path(result.stdout.strip())
    assert (orphan / "weights").exists()
    with open_scratch(tmp_path) as first, open_scratch(tmp_path) as second:
        assert first != second
        assert first.exists() and second.exists() and foreign.exists()
        assert not orphan.exists()


def test_the_default_is_the_directory_of_temporary_files() -> None:
    with open_scratch() as path:
        assert os.access(path, os.W_OK)
