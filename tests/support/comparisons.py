"""Stands for the runs of a comparison: what they would leave, without a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.past_runs import write_run


class Launcher:
    """In place of `subprocess.Popen`: leaves the directory of a run of the overrides it is given,
    ended with `code`.
    """

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.streams: list[dict[str, Any]] = []
        self.code: int | None = 0
        self.other: list[str] = []  # what the run is made of instead of what was asked for
        self.during: Callable[[], Any] = lambda: None
        self.outcome: Callable[[Sequence[str]], dict[str, Any]] = (
            lambda overrides: {}
        )  # arguments of `write_run`

    def __call__(self, command: list[str], **streams: Any) -> Launcher:
        self.commands.append(command)
        self.streams.append(streams)
        script = next(index for index, word in enumerate(command) if word.endswith("train_rl.py"))
        ranks = [
            int(word.partition("=")[2]) for word in command if word.startswith("--nproc-per-node=")
        ]
        overrides = [*command[script + 1 :], *self.other]
        left = {"code": self.code, "ranks": (ranks or [1])[0]} | self.outcome(overrides)
        write_run(overrides, **left)
        self.returncode = 0 if left["code"] == 0 else 1
        return self

    def wait(self, timeout: float | None = None) -> int:
        self.during()
        return self.returncode

    def poll(self) -> int:
        return self.returncode

    @property
    def names(self) -> list[str]:
        """Of the runs, in the order of their start."""
        return [value_of(command, "run.name") for command in self.commands]


def value_of(overrides: Sequence[str], key: str) -> str:
    """The last value that a key is given; '' for none."""
    values = [word.partition("=")[2] for word in overrides if word.startswith(f"{key}=")]
    return values[-1] if values else ""


def complete(
    tmp_path: Path, name: str, *overrides: str, experiment: str = "quickstart", **kind: Any
) -> Path:
    """A run that the comparison in tmp_path/out has made already."""
    place = (f"run.root={tmp_path / 'out'}", f"run.name={name}")
    return write_run([f"experiment={experiment}", *place, *overrides], **kind)
