"""The command that a rank executes at present, for those who watch the rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class RunningCommand:
    """A command that a rank executes.

    number: how many commands the rank has begun, this one included. All ranks execute the same
    commands. start: when it began, by `time.monotonic`.
    """

    number: int
    name: str
    start: float


class Activity:
    """Holds the current command of this rank.

    The main thread writes it and other threads read it.
    """

    def __init__(self) -> None:
        self._count = 0
        self._current: RunningCommand | None = None

    @property
    def current(self) -> RunningCommand | None:
        """The command that runs, None while the rank waits for the next one."""
        return self._current

    @contextlib.contextmanager
    def command(self, name: str) -> Iterator[None]:
        """Hold a command while the body runs."""
        self._count += 1
        self._current = RunningCommand(self._count, name, time.monotonic())
        try:
            yield
        finally:
            self._current = None
