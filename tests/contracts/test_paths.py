"""What a user gives as a path is answered in words: names that are too long, folders of others,
files as folders.
"""

import os
from pathlib import Path

import pytest

from megatron_rl.contracts.paths import lost_folder, problem_with, problem_with_new
from megatron_rl.models.checkpoint_inspection import inspect_checkpoint


def test_a_file_and_a_directory_are_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert problem_with(str(tmp_path), folder=True) is None
    assert problem_with(str(tmp_path / "file"), folder=False) is None
    assert problem_with(str(tmp_path / "file"), folder=True) == "It is a file, not a directory"
    assert problem_with(str(tmp_path), folder=False) == "There is no such file: it is a directory"
    assert (
        problem_with(str(tmp_path / "file" / "deeper"), folder=True) == "There is no such directory"
    )
    assert problem_with("x" * 300, folder=False) == "It cannot be looked at (File name too long)"
    assert problem_with("a\0b", folder=False) == "It cannot be looked at (embedded null byte)"


def test_folders_of_others_are_refused_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(path: object, **options: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", forbidden)
    told = "It cannot be looked at (Permission denied)"
    assert problem_with("/secret/model", folder=True) == problem_with_new("/secret/runs") == told
    assert inspect_checkpoint("/secret/model")[1][0].rule == told


def test_what_one_may_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert problem_with(str(tmp_path / "file"), folder=False) == "This user may not read that file"
    assert problem_with_new(str(tmp_path / "runs")) == f"{tmp_path} is not writable for this user"


def test_where_a_directory_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert problem_with_new(str(tmp_path / "a" / "b")) is None
    assert problem_with_new("") == "It names no directory"
    assert problem_with_new(str(tmp_path / "file" / "b")) == f"{tmp_path / 'file'} is a file"
    assert problem_with_new("x" * 300) == "It cannot be looked at (File name too long)"
    assert "home directory" in (problem_with_new("~nobody-99/runs") or "")


def test_folders_of_a_search_path(tmp_path: Path) -> None:
    assert lost_folder(f"[file://{tmp_path},pkg://somebody.conf]") is None
    assert lost_folder(f"['file://{tmp_path}', file://{tmp_path}/no]") == f"file://{tmp_path}/no"
    assert lost_folder("/tmp") == "/tmp"
