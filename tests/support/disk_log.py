"""Notes what a program flushes to the disk and renames, in order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class DiskLog:
    """The events on the disk since the start of the log.

    events: ("sync", file or folder) and ("rename", new name), in order. sizes: the bytes that a
    file had on the disk when it was flushed last.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, Path]] = []
        self.sizes: dict[Path, int] = {}
        monkeypatch.setattr("os.fsync", self._sync)
        for name in ("rename", "replace"):
            monkeypatch.setattr(f"os.{name}", self._note_renames(getattr(os, name)))

    def is_in_order(self, *events: tuple[str, Path]) -> bool:
        """True if all these events happened, each after the one before."""
        rest = iter(self.events)
        return all(event in rest for event in events)

    def _sync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        self.sizes[path] = os.fstat(descriptor).st_size
        self.events.append(("sync", path))

    def _note_renames(self, rename: object) -> object:
        def note_and_rename(source: Path, target: Path) -> None:
            rename(source, target)  # type: ignore[operator]
            self.events.append(("rename", Path(target)))

        return note_and_rename
