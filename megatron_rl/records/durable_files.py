"""Files that survive a power failure: written and flushed to the disk."""

from __future__ import annotations

import os
from pathlib import Path


def write_synced(file: Path, data: bytes) -> None:
    """Write a file that has reached the disk when this returns."""
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """The names in a folder have reached the disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
