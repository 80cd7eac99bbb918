"""A run's directory: created once, never shared by two runs."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
from dataclasses import dataclass
from pathlib import Path

import msgspec
from omegaconf import OmegaConf

from megatron_rl.config.schema import Configuration, RunSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure

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
    def create(cls, configuration: Configuration, now: datetime.datetime) -> RunDirectory:
        """Make the directory. Raises `RunDirectoryTaken` when it exists, even from a run that has ended.

        Ranks read different clocks: call it on rank 0. Raises `RunDirectoryUnusable` where nothing can be made.
        """
        path = path_of(configuration.run, now)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise RunDirectoryTaken(
                f"run.name={path.name!r}: {path} exists already, and two runs never share a directory; "
                "choose another run.name, or move the old run away"
            ) from None
        except OSError as error:
            raise RunDirectoryUnusable(
                f"run.root={str(path.parent)!r}: no directory can be made there ({error}); give another run.root"
            ) from error
        directory = cls(path)
        for name in ("logs", "rollouts", "checkpoints"):
            (path / name).mkdir()
        (path / "config.yaml").write_text(to_yaml(configuration))
        (path / "versions.json").write_text(json.dumps(_versions(), indent=2) + "\n")
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

    def write_exit(self, code: int, reason: str) -> None:
        ended = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        (self.path / "exit.json").write_text(json.dumps({"code": code, "reason": reason, "ended": ended}) + "\n")


def path_of(run: RunSettings, now: datetime.datetime) -> Path:
    """The absolute path of a run's directory; a run without a name is called after its experiment and `now`."""
    name = run.name if run.name is not None else f"{run.experiment}-{now:%Y%m%d-%H%M%S}"
    return Path(run.root).expanduser().resolve() / name


def to_yaml(configuration: Configuration) -> str:
    """Every key with its value, as YAML."""
    return OmegaConf.to_yaml(msgspec.to_builtins(configuration))


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions
