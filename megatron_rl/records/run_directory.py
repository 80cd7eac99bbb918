"""A run's directory: created once, never shared by two runs."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import platform
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
from omegaconf import OmegaConf

from megatron_rl.config.schema import Configuration, RunSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.records.exit_record import read_exit_record, reserve_exit_record
from megatron_rl.records.run_lock import run_is_alive

STOP_FILE = "stop"  # whoever makes it asks the run to save and end
PACKAGES = ("torch", "megatron-core", "sglang", "triton", "transformers", "hydra-core", "numpy")


class RunDirectoryUnusable(Failure):
    """The directory cannot be made."""

    exit_code = ExitCode.REFUSED


class RunDirectoryTaken(RunDirectoryUnusable):
    """Another run owns the directory."""


@dataclass(frozen=True)
class RunDirectory:
    """Paths inside one run's directory."""

    path: Path

    @classmethod
    def create(
        cls, configuration: Configuration, now: datetime.datetime, *, ranks: int = 1
    ) -> RunDirectory:
        """Make the directory. Raises `RunDirectoryTaken` when it exists, even from a run that has
        ended.

        run.on_existing=overwrite_failed removes what a run left that did not complete. Ranks read
        different clocks: call it on rank 0. ranks: how many there are. Raises
        `RunDirectoryUnusable` where nothing can be made.
        """
        path = path_of(configuration.run, now)
        if configuration.run.on_existing == "overwrite_failed":
            _remove_failed(path)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise _taken(path, "two runs never share a directory") from None
        except OSError as error:
            raise RunDirectoryUnusable(
                f"run.root={str(path.parent)!r}: no directory can be made there ({error}); give another run.root"
            ) from error
        directory = cls(path)
        with contextlib.ExitStack() as undo:
            undo.callback(
                shutil.rmtree, path, ignore_errors=True
            )  # half a directory would only block the name
            for name in ("logs", "rollouts", "checkpoints"):
                (path / name).mkdir()
            (path / "config.yaml").write_text(to_yaml(configuration))
            (path / "versions.json").write_text(
                json.dumps(_versions() | {"ranks": ranks}, indent=2) + "\n"
            )
            reserve_exit_record(path)
            undo.pop_all()
        return directory

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
        """One log a process, such as `engine-0-0.log` or `collector-0.log`."""
        return self.path / "logs"


def path_of(run: RunSettings, now: datetime.datetime) -> Path:
    """The absolute path of a run's directory; a run without a name is called after its experiment
    and `now`.
    """
    name = run.name if run.name is not None else f"{run.experiment}-{now:%Y%m%d-%H%M%S}"
    return Path(run.root).expanduser().resolve() / name


def to_yaml(configuration: Configuration) -> str:
    """Every key with its value, as YAML."""
    return OmegaConf.to_yaml(msgspec.to_builtins(configuration))


def _remove_failed(path: Path) -> None:
    """Remove the directory of a run that ended without completing.

    Raises `RunDirectoryTaken` for any other.
    """
    if not path.exists():
        return
    if not all((path / name).is_file() for name in ("config.yaml", "versions.json")):
        raise _taken(path, "it is not the directory of a run")
    if (ended := read_exit_record(path)) is not None and ended.code == ExitCode.OK:
        raise _taken(path, "its run is complete")
    if run_is_alive(path):
        raise _taken(path, "a process of its run is still alive")
    aside = path.with_name(
        f".{path.name}.{secrets.token_hex(4)}"
    )  # half of it must never stand under the name
    try:
        path.rename(aside)
        shutil.rmtree(aside)
    except OSError as error:
        raise _taken(path, f"it cannot be removed ({error})") from error


def _taken(path: Path, why: str) -> RunDirectoryTaken:
    return RunDirectoryTaken(
        f"run.name={path.name!r}: {path} exists already, and {why}; choose another run.name, move the old run away, "
        "or, if it failed, use its name again: run.on_existing=overwrite_failed"
    )


def _versions() -> dict[str, str]:
    """Of Python, the platform and the packages that decide what a run computes."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
