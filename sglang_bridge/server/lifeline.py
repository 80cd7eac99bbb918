"""A pipe that shows helper processes if the trainer is still alive."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO


class Lifeline:
    """The trainer holds it for as long as its helpers shall live.

    One lifeline serves any number of helpers.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        # A child that is forked without exec would keep the pipe open, so it closes its copy.
        # torch's spawn is no such child.
        os.register_at_fork(after_in_child=self.close)

    @property
    def read_end(self) -> int:
        """The descriptor that a supervisor inherits."""
        return self._read

    def close(self) -> None:
        """Break the lifeline: its supervisors end every helper on it."""
        for descriptor in (self._read, self._write):
            if descriptor >= 0:
                os.close(descriptor)
        self._read = self._write = -1


def start_supervised(
    command: Sequence[str],
    *,
    lifeline: Lifeline,
    environment: Mapping[str, str],
    log: IO[bytes] | int | None = None,
    grace_seconds: float = 5.0,
    scratch: tuple[str, Path] | None = None,
    descriptors: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Run a command under a supervisor that ends its whole process tree when the lifeline breaks.

    The returned process is the supervisor. It ends when the command does, with the command's exit
    code (128 + signal number if a signal ended it). SIGTERM to it ends the tree.

    log: receives stdout and stderr. grace_seconds: time between SIGTERM and SIGKILL.
    scratch: an environment variable, and the directory that it names to the command. The
    supervisor creates that directory, and removes it at the end. descriptors: of open
    files that the command inherits, under the same numbers.
    """
    scratch_option = [] if scratch is None else [f"--scratch={scratch[0]}={scratch[1]}"]
    supervisor = [
        sys.executable,
        "-m",
        "sglang_bridge.server.supervise",
        f"--lifeline={lifeline.read_end}",
        f"--grace-seconds={grace_seconds}",
        *scratch_option,
        *(f"--descriptor={descriptor}" for descriptor in descriptors),
        "--",
        *command,
    ]
    return subprocess.Popen(
        supervisor,
        env={**environment, "PYTHONPATH": _with_package_root(environment.get("PYTHONPATH"))},
        pass_fds=(lifeline.read_end, *descriptors),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT if log is not None else None,
        # An interrupt typed at a terminal reaches the trainer alone, which ends its helpers.
        start_new_session=True,
    )


def _with_package_root(search_path: str | None) -> str:
    root = str(Path(__file__).parents[2])
    parts = search_path.split(os.pathsep) if search_path else []
    return os.pathsep.join(parts if root in parts else [*parts, root])
