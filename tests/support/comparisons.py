"""Replaces the runs of a comparison by the directories that they would leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.past_runs import write_run


class Launcher:
    """Replaces `subprocess.Popen`: writes the directory of a run that ended with `code`.

    commands, streams: the arguments of every start.
    extra_overrides: overrides that the run has beyond its command line.
    during: called while the run is waited for.
    outcome: further arguments of `write_run` for a run with the given overrides.
    """

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.streams: list[dict[str, Any]] = []
        self.code: int | None = 0
        self.extra_overrides: list[str] = []
        self.during: Callable[[], Any] = lambda: None
        self.outcome: Callable[[Sequence[str]], dict[str, Any]] = lambda overrides: {}

    def __call__(self, command: list[str], **streams: Any) -> Launcher:
        self.commands.append(command)
        self.streams.append(streams)
        script = next(index for index, word in enumerate(command) if word.endswith("train_rl.py"))
        ranks = value_of(command, "--nproc-per-node") or "1"
        overrides = [*command[script + 1 :], *self.extra_overrides]
        options = {"code": self.code, "ranks": int(ranks)} | self.outcome(overrides)
        write_run(overrides, **options)
        self.returncode = 0 if options["code"] == 0 else 1
        return self

    def wait(self, timeout: float | None = None) -> int:
        self.during()
        return self.returncode

    def poll(self) -> int:
        return self.returncode

    @property
    def names(self) -> list[str]:
        """Names of the runs in the order of their start."""
        return [value_of(command, "run.name") for command in self.commands]


def value_of(overrides: Sequence[str], key: str) -> str:
    """The last value of a key, or an empty string."""
    values = [word.partition("=")[2] for word in overrides if word.startswith(f"{key}=")]
    return values[-1] if values else ""


def write_existing_run(
    tmp_path: Path, name: str, *overrides: str, experiment: str = "quickstart", **options: Any
) -> Path:
    """Write a run that a comparison in tmp_path/out has trained before, complete by default."""
    location = (f"run.root={tmp_path / 'out'}", f"run.name={name}")
    return write_run([f"experiment={experiment}", *location, *overrides], **options)
