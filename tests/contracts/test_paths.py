"""What a user gives as a path is answered in words: names that are too long, folders of others,
files as folders.
"""

import os
from pathlib import Path

import pytest

from megatron_rl.contracts.paths import missing_directory, path_problem, new_directory_problem
from megatron_rl.models.checkpoint_inspection import inspect_checkpoint


def test_a_file_and_a_directory_are_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert path_problem(str(tmp_path), folder=True) is None
    assert path_problem(str(tmp_path / "file"), folder=False) is None
    assert path_problem(str(tmp_path / "file"), folder=True) == "It is a file, not a directory"
    assert path_problem(str(tmp_path), folder=False) == "There is no such file: it is a directory"
    assert (
        path_problem(str(tmp_path / "file" / "deeper"), folder=True) == "There is no such directory"
    )
    assert path_problem("x" * 300, folder=False) == "It cannot be looked at (File name too long)"
    assert path_problem("a\0b", folder=False) == "It cannot be looked at (embedded null byte)"


def test_folders_of_others_are_refused_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(path: object, **options: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", forbidden)
    told = "It cannot be looked at (Permission denied)"
    assert path_problem("/secret/model", folder=True) == new_directory_problem("/secret/runs") == told
    assert inspect_checkpoint("/secret/model")[1][0].rule == told


def test_what_one_may_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert path_problem(str(tmp_path / "file"), folder=False) == "This user may not read that file"
    assert new_directory_problem(str(tmp_path / "runs")) == f"{tmp_path} is not writable for this user"


def test_where_a_directory_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert new_directory_problem(str(tmp_path / "a" / "b")) is None
    assert new_directory_problem("") == "It names no directory"
    assert new_directory_problem(str(tmp_path / "file" / "b")) == f"{tmp_path / 'file'} is a file"
    assert new_directory_problem("x" * 300) == "It cannot be looked at (File name too long)"
    assert "home directory" in (new_directory_problem("~nobody-99/runs") or "")


def test_folders_of_a_search_path(tmp_path: Path) -> None:
    assert missing_directory(f"[file://{tmp_path},pkg://somebody.conf]") is None
    assert missing_directory(f"['file://{tmp_path}', file://{tmp_path}/no]") == f"file://{tmp_path}/no"
    assert missing_directory("/tmp") == "/tmp"
