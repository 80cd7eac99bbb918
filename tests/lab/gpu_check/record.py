"""The files of a check: its record, and the output of its stages.

Both are complete at any moment, because the command may be killed at any moment.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.lab.gpu_check.outcome import Outcome

RECORD_NAME = "check.json"
LOG_NAME = "check.log"
MAX_LOG_BYTES = 15 << 20
_SECONDS_BETWEEN_SAVES = 1.0


class Record:
    """The record of a check, `check.json`.

    details: what it holds beside the stages. It may grow.
    """

    def __init__(self, folder: Path, details: Mapping[str, Any], stages: Sequence[str]) -> None:
        self.file = folder / RECORD_NAME
        self.details = dict(details)
        self.outcomes = [Outcome(stage) for stage in stages]
        self._next_save = 0.0

    def save(self) -> None:
        """Replace the file. Raises `OSError`, for example if the disk is full."""
        self._next_save = time.monotonic() + _SECONDS_BETWEEN_SAVES
        machine = next((o.values for o in self.outcomes if o.stage == "machine"), {})
        stages = [asdict(outcome) for outcome in self.outcomes]
        text = json.dumps(self.details | {"machine": machine, "stages": stages}, indent=1)
        temporary_file = self.file.with_name(f".{self.file.name}")
        temporary_file.write_text(text + "\n")
        os.replace(temporary_file, self.file)

    def save_sometimes(self) -> None:
        """Replace the file, at most once a second. Call it again if nothing else changes."""
        if time.monotonic() >= self._next_save:
            self.save()


class Log:
    """The output of all stages, `check.log`, at most `max_bytes`.

    Of a stage with more than its share, the first third and at least the last third are kept.

    sections: their number.
    """

    def __init__(self, folder: Path, sections: int, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._file = (folder / LOG_NAME).open("w+b", buffering=0)
        self._third = max(max_bytes // max(sections, 1) // 3, 1)
        self._start = 0
        self._size = 0

    def begin(self, title: str) -> None:
        """Begin the section of a stage."""
        self._start = self._file.seek(0, os.SEEK_END)
        self._size = 0
        self.write(f"===== {title}\n".encode())

    def write(self, data: bytes) -> None:
        """Append output. Raises `OSError`, for example if the disk is full."""
        for start in range(0, len(data), self._third):
            part = data[start : start + self._third]
            if self._size + len(part) > 3 * self._third:
                self._drop_middle()
            self._size += _write_all(self._file, part)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _drop_middle(self) -> None:
        """Keep the first and the last third of the section."""
        self._file.seek(self._start + self._size - self._third)
        tail = self._file.read(self._third)
        note = b"\n[...]\n"
        self._file.seek(self._start + self._third)
        self._file.truncate()
        self._size = self._third
        self._size += _write_all(self._file, note + tail[len(note) :])


def _write_all(file: Any, data: bytes) -> int:
    """Write all bytes, which one call need not do, and return their number."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
    return len(data)
