"""Marks the directories of living runs.

Each rank holds a shared lock on a file of the run directory. The kernel releases the lock when the
process ends.
"""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import IO

_NAME = ".alive"
_TIMEOUT_SECONDS = 5.0


def mark_run_alive(directory: Path) -> IO[bytes]:
    """Mark a run as alive for as long as the returned file is open.

    Raises `OSError` where the file system has no locks.
    """
    file = (directory / _NAME).open("ab")
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            # `run_is_alive` in another process holds the lock for a moment
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return file


def claim_run(directory: Path) -> IO[bytes] | None:
    """Mark a run as alive for the one process that resumes it.

    Returns None while a process of the run is alive, and where the file system has no locks.
    Raises `OSError` when the directory cannot be written.
    """
    file = (directory / _NAME).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Share the lock with the other ranks. This fails if another process claimed the run
        # between the two calls.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def run_is_alive(directory: Path) -> bool:
    """True while a rank of the run is alive, and where the file system has no locks."""
    try:
        with (directory / _NAME).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        # No rank of the run has marked it yet
        return False
    except OSError:
        return True
    return False
