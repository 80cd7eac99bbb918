"""File operations that survive a power failure."""

from __future__ import annotations

import os
from pathlib import Path


def write_synced(file: Path, data: bytes) -> None:
    """Write a file and flush it to the disk."""
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the names of the files in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
