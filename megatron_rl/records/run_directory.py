"""The directory of a run: created once, and never shared by two runs."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import msgspec
from omegaconf import OmegaConf

from megatron_rl.config.schema import Configuration, RunSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.records.exit_record import read_exit_record, reserve_exit_record
from megatron_rl.records.run_lock import run_is_alive

# The run saves a checkpoint and ends when this file appears in its directory
STOP_FILE = "stop"
# The folder that holds one folder for each time that the run was resumed
ARCHIVE = "resumed"
_SOURCE = Path(__file__).resolve().parents[1]
_GIT_SECONDS = 5.0
PACKAGES = ("torch", "megatron-core", "sglang", "triton", "transformers", "hydra-core", "numpy")
_FOLDERS = ("logs", "rollouts", "checkpoints")


@dataclass(frozen=True)
class RunDirectory:
    """The paths inside the directory of one run."""

    path: Path

    def create(self, configuration: Configuration, *, ranks: int = 1) -> None:
        """Make the directory of a new run. Rank 0 only.

        run.on_existing=overwrite_failed removes the directory of a run that did not complete.
        ranks: the number of ranks of the run. Raises `Failure` when the directory
        exists, and `Failure` when it cannot be made.
        """
        path = self.path
        if configuration.run.on_existing == "overwrite_failed":
            _remove_failed(path)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise _directory_taken(path, "two runs never share a directory") from None
        except OSError as error:
            raise Failure(
                f"run.root={str(path.parent)!r}: no directory can be made there ({error}). Choose "
                "another run.root",
                ExitCode.REFUSED,
            ) from error
        with contextlib.ExitStack() as undo:
            # An incomplete directory would only block its name
            undo.callback(shutil.rmtree, path, ignore_errors=True)
            self.make_folders()
            (path / "config.yaml").write_text(to_yaml(configuration))
            versions = _versions() | {"ranks": ranks}
            (path / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")
            reserve_exit_record(path)
            undo.pop_all()

    def make_folders(self) -> None:
        """Make the folders of the directory that are missing."""
        for name in _FOLDERS:
            (self.path / name).mkdir(exist_ok=True)

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """The folder with one log for each process, such as `engine-0-0.log`."""
        return self.path / "logs"


def run_directory_path(run: RunSettings, now: datetime.datetime) -> Path:
    """The absolute path of a run's directory.

    A run without run.name is named after `now`. The clocks of ranks differ, so rank 0 tells the
    others.
    """
    name = run.name if run.name is not None else f"{now:%Y%m%d-%H%M%S}"
    return Path(run.root).expanduser().resolve() / name


def is_run_directory(path: Path) -> bool:
    """True for a directory that a run has made."""
    return all((path / name).is_file() for name in ("config.yaml", "versions.json"))


def to_yaml(configuration: Configuration) -> str:
    """Write every key with its value as YAML."""
    return OmegaConf.to_yaml(msgspec.to_builtins(configuration))


def _remove_failed(path: Path) -> None:
    """Remove the directory of a run that ended without completing.

    Raises `Failure` for any other directory.
    """
    if not path.exists():
        return
    if not is_run_directory(path):
        raise _directory_taken(path, "it is not the directory of a run")
    exit_record = read_exit_record(path)
    if exit_record is not None and exit_record.code == ExitCode.OK:
        raise _directory_taken(path, "its run is complete")
    if run_is_alive(path):
        raise _directory_taken(path, "a process of its run is still alive")
    # Rename it first: half a directory must never stand under the name of a run
    trash = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.rename(trash)
        shutil.rmtree(trash)
    except OSError as error:
        raise _directory_taken(path, f"it cannot be removed ({error})") from error


def _directory_taken(path: Path, reason: str) -> Failure:
    return Failure(
        f"run.name={path.name!r}: {path} exists already, and {reason}. Choose another run.name, "
        "move the old run away, or, if it failed, reuse its name with "
        "run.on_existing=overwrite_failed",
        ExitCode.REFUSED,
    )


def _versions() -> dict[str, str]:
    """The versions of everything that influences a run's numbers."""
    versions = {
        "commit": commit_of(_SOURCE),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def commit_of(source: Path) -> str:
    """Return the commit of a folder of source, and if it has changes. "unknown" without git."""
    commit = _git(
        source, "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=, with changes"
    )
    is_tracked = bool(_git(source, "ls-files", "--", "."))
    return commit if commit and is_tracked else "unknown"


def _git(source: Path, *arguments: str) -> str:
    """Return the output of a git command about a folder, an empty text if it fails."""
    # A caller that is a git hook would name its own repository
    environment = {key: text for key, text in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "-C", str(source), *arguments]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_GIT_SECONDS
        )
        return result.stdout.strip() if result.returncode == 0 else ""
    return ""
