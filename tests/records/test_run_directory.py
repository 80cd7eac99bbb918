"""The directory of a run: its path, its files, and its protection against other runs."""

import dataclasses
import datetime
import fcntl
import json
import subprocess
import threading
from pathlib import Path
from typing import Any, Literal

import pytest
from omegaconf import OmegaConf
from pydantic import TypeAdapter

from megatron_rl import records
from megatron_rl.config import schema
from megatron_rl.config.keys import declared_keys
from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.records.exit_record import write_exit_record
from megatron_rl.records.run_directory import RunDirectory, commit_of, run_directory_path, to_yaml
from megatron_rl.records.run_lock import claim_run, mark_run_alive, run_is_alive
from tests.support.configurations import configuration_of
from tests.support.past_runs import make_run_directory


def test_the_path_of_a_run_directory(tmp_path: Path) -> None:
    noon = datetime.datetime(2025, 1, 2, 12, 0, 5)
    run = schema.RunSettings(root=str(tmp_path))
    assert run_directory_path(run, noon) == tmp_path / "20250102-120005"
    assert run_directory_path(dataclasses.replace(run, name="mine"), noon) == tmp_path / "mine"


@pytest.mark.slow
def test_config_yaml_holds_every_key_and_reads_back() -> None:
    config = configuration_of(["run.name='1e3'", "optimizer.lr=3e-5", "algo=gspo"])
    tree: Any = OmegaConf.to_container(OmegaConf.create(to_yaml(config)))
    assert TypeAdapter(schema.Configuration).validate_python(tree) == config
    keys = {
        f"{section}.{key}"
        for section, inner in tree.items()
        if isinstance(inner, dict)
        for key in inner
    }
    for group in ("correction", "kl"):
        keys |= {f"algo.{group}.{key}" for key in tree["algo"][group]}
    sections = {key.partition(".")[0] for key in declared_keys() if "." in key}
    assert keys | {"seed", "mode", "curriculum"} == declared_keys("gspo").keys() - sections


def test_a_directory_belongs_to_one_run(tmp_path: Path) -> None:
    config = configuration_of([f"run.root={tmp_path}", "run.name=mine"])
    directory = make_run_directory(config)
    assert directory.path == tmp_path / "mine"
    assert {path.name for path in directory.path.iterdir()} == {
        "logs",
        "rollouts",
        "checkpoints",
        "config.yaml",
        "versions.json",
        ".exit-reserve",
    }
    with pytest.raises(Failure, match=r"run\.name='mine'.*another run\.name"):
        make_run_directory(config)
    inside_a_file = dataclasses.replace(
        config, run=dataclasses.replace(config.run, root=str(tmp_path / "mine/config.yaml"))
    )
    with pytest.raises(Failure, match=r"run\.root"):
        make_run_directory(inside_a_file)


def test_versions_hold_the_commit_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration_of([f"run.root={tmp_path}/runs", "run.name=a"])
    versions = make_run_directory(config).path / "versions.json"
    commit = json.loads(versions.read_text())["commit"]
    assert commit == commit_of(Path(records.__file__).parents[1])
    repository = tmp_path / "repository"
    package = repository / "package"
    package.mkdir(parents=True)
    (package / "code.py").write_text("x = 1\n")
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "x"], check=True)
    head = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    assert commit_of(package) == head
    (package / "code.py").write_text("x = 2\n")
    assert commit_of(repository) == f"{head}, with changes"
    (package / "build").mkdir()
    assert commit_of(package / "build") == "unknown", "git does not know it"
    outside = tmp_path / "installed"
    outside.mkdir()
    assert commit_of(outside) == "unknown"
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "without_git").mkdir()
    assert commit_of(tmp_path / "without_git") == "unknown"


def create_again(
    tmp_path: Path, on_existing: Literal["refuse", "overwrite_failed"] = "overwrite_failed"
) -> RunDirectory:
    config = configuration_of()
    run = dataclasses.replace(config.run, root=str(tmp_path), name="mine", on_existing=on_existing)
    return make_run_directory(dataclasses.replace(config, run=run))


@pytest.mark.slow
@pytest.mark.parametrize("code", [4, None])
def test_overwrite_failed_reuses_the_name_of_a_failed_run(tmp_path: Path, code: int | None) -> None:
    first = create_again(tmp_path)
    (first.path / "metrics.jsonl").write_text("old")
    if code is not None:
        write_exit_record(first.path, code, "the engine died")
    with pytest.raises(Failure, match=r"run\.on_existing=overwrite_failed"):
        create_again(tmp_path, "refuse")
    second = create_again(tmp_path)
    assert second.path == first.path and not second.metrics_file.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_complete_run_is_never_overwritten(tmp_path: Path) -> None:
    first = create_again(tmp_path)
    write_exit_record(first.path, 0, "the run is complete")
    with pytest.raises(Failure, match="its run is complete"):
        create_again(tmp_path)
    assert (first.path / "exit.json").exists()


@pytest.mark.slow
def test_a_run_that_is_still_alive_is_never_overwritten(tmp_path: Path) -> None:
    first = create_again(tmp_path)
    two_ranks = [mark_run_alive(first.path), mark_run_alive(first.path)]
    for lock in two_ranks:
        with pytest.raises(Failure, match="still alive"):
            create_again(tmp_path)
        lock.close()
    create_again(tmp_path)


def test_a_directory_that_cannot_be_removed_leaves_the_name_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = create_again(tmp_path)

    def remove_half(path: Path) -> None:
        (path / "config.yaml").unlink()
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("megatron_rl.records.run_directory.shutil.rmtree", remove_half)
    with pytest.raises(Failure, match=r"cannot be removed .*Permission denied"):
        create_again(tmp_path)
    assert not first.path.exists(), "half a directory must not have the name of a run"


def test_the_other_ranks_join_the_process_that_claimed_the_run(tmp_path: Path) -> None:
    directory = create_again(tmp_path).path
    claim = claim_run(directory)
    assert claim is not None
    with claim, mark_run_alive(directory):
        assert run_is_alive(directory)


def test_a_rank_marks_its_run_while_another_process_checks_it(
    tmp_path: Path,
) -> None:
    """The check holds the lock for a moment."""
    directory = create_again(tmp_path).path
    checker = (directory / ".alive").open("ab")
    fcntl.flock(checker, fcntl.LOCK_EX)
    threading.Timer(0.1, checker.close).start()
    with mark_run_alive(directory):
        assert checker.closed
        assert run_is_alive(directory)


def test_a_directory_of_something_else_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("data")
    with pytest.raises(Failure, match="not the directory of a run"):
        create_again(tmp_path)
    assert (tmp_path / "mine" / "precious").read_text() == "data"


def test_an_incomplete_directory_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(directory: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron_rl.records.run_directory.reserve_exit_record", full)
    with pytest.raises(OSError, match="No space"):
        create_again(tmp_path)
    assert list(tmp_path.iterdir()) == []
