"""Problems of paths that a user gives are returned as text and never raised."""

import os
from pathlib import Path

import pytest

from megatron_rl.contracts.paths import missing_directory, new_directory_problem, path_problem
from megatron_rl.models.hf_checkpoint.inspection import inspect_checkpoint


def test_path_problem_tells_files_from_directories(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert path_problem(str(tmp_path), folder=True) is None
    assert path_problem(str(file), folder=False) is None
    assert path_problem(str(file), folder=True) == "It is a file, not a directory"
    assert path_problem(str(tmp_path), folder=False) == "There is no such file: it is a directory"
    assert path_problem(str(file / "deeper"), folder=True) == "There is no such directory"
    assert "File name too long" in (path_problem("x" * 300, folder=False) or "")
    assert "embedded null" in (path_problem("a\0b", folder=False) or "")


def test_inaccessible_folders_are_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(path: object, **options: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", forbid)
    problem = path_problem("/secret/model", folder=True)
    assert "Permission denied" in (problem or "")
    assert new_directory_problem("/secret/runs") == problem
    assert inspect_checkpoint("/secret/model")[1][0].rule == problem


def test_missing_permissions_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "may not read" in (path_problem(str(tmp_path / "file"), folder=False) or "")
    problem = new_directory_problem(str(tmp_path / "runs"))
    assert problem == f"{tmp_path} is not writable for this user"


def test_new_directory_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert new_directory_problem(str(tmp_path / "a" / "b")) is None
    assert new_directory_problem("") == "It names no directory"
    assert new_directory_problem(str(tmp_path / "file" / "b")) == f"{tmp_path / 'file'} is a file"
    assert "stores no files" in (new_directory_problem("/proc/x/runs") or "")
    assert "File name too long" in (new_directory_problem("x" * 300) or "")
    assert "home directory" in (new_directory_problem("~nobody-99/runs") or "")


def test_missing_directory_of_a_search_path(tmp_path: Path) -> None:
    missing = f"file://{tmp_path}/no"
    assert missing_directory(f"[file://{tmp_path},pkg://somebody.conf]") is None
    assert missing_directory(f"['file://{tmp_path}', {missing}]") == missing
    assert missing_directory("/tmp") == "/tmp"
