"""The file timeline.jsonl: when a run did what, on the clock of rank 0.

Each line is a span, written at its end. A killed run leaves whole lines and at most a part of one.
A resumed run appends.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

TIMELINE_FILE = "timeline.jsonl"


class Lane(enum.StrEnum):
    """The lanes of a timeline: the sampling of groups, and the commands that all ranks execute."""

    ROLLOUTS = "rollouts"
    RANKS = "ranks"


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that took time.

    start, end: in seconds since 1970. step: the training step that it belongs to,
    -1 without one. tokens: tokens that engines sampled for a group.
    """

    lane: Lane
    name: str
    start: float
    end: float
    step: int = -1
    tokens: int = 0


class Timeline:
    """Writes spans to a file, about 110 bytes each.

    A disk that is full ends the timeline and not the run. log: writes a line for people.
    """

    def __init__(
        self, file: Path, log: Callable[[str], None], clock: Callable[[], float] = time.time
    ) -> None:
        self._file = file
        self._log = log
        self._clock = clock
        self._stream: BinaryIO | None = file.open("ab", buffering=0)
        self._complete_line()

    def add(
        self,
        lane: Lane,
        name: str,
        seconds: float,
        *,
        ago: float = 0.0,
        step: int = -1,
        tokens: int = 0,
    ) -> None:
        """Add a span. seconds: its duration. ago: seconds since its end."""
        if self._stream is None:
            return
        end = self._clock() - ago
        span = Span(lane, name, round(end - seconds, 6), round(end, 6), step, tokens)
        try:
            self._stream.write(msgspec.json.encode(span) + b"\n")
        except OSError as error:
            self._log(f"warning: {self._file} is not continued: {error}")
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Write nothing more."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _complete_line(self) -> None:
        """End the line that a killed run has left."""
        if self._stream is None or not self._file.stat().st_size:
            return
        with self._file.open("rb") as stream:
            stream.seek(-1, os.SEEK_END)
            is_complete = stream.read(1) == b"\n"
        if not is_complete:
            self._stream.write(b"\n")


def read_timeline(file: Path) -> Iterator[Span]:
    """Yield the spans of a file. Skips lines that a killed run has not finished.

    Raises OSError.
    """
    for line in file.read_bytes().splitlines():
        try:
            yield msgspec.json.decode(line, type=Span)
        except msgspec.DecodeError:
            continue
