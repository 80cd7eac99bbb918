"""Which run directories belong to living processes: each rank holds a shared lock, which ends with
the process.
"""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import IO

_NAME = ".alive"
_PATIENCE_SECONDS = 5.0


def hold_run(directory: Path) -> IO[bytes]:
    """Mark a run as alive for as long as the returned file is open.

    Raises `OSError` where files cannot be locked.
    """
    file = (directory / _NAME).open("ab")
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # somebody is just looking whether the run lives
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return file


def claim_run(directory: Path) -> IO[bytes] | None:
    """As `hold_run`, for the one process that goes on with a run; None while a process of it lives.

    None also where files cannot be locked. Raises `OSError` where the directory cannot be written.
    """
    file = (directory / _NAME).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(
            file, fcntl.LOCK_SH | fcntl.LOCK_NB
        )  # other ranks share it; fails if another claim came between
    except OSError:
        file.close()
        return None
    return file


def run_is_alive(directory: Path) -> bool:
    """Whether a rank of the run of a directory still lives; also where that cannot be told."""
    try:
        with (directory / _NAME).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False  # it never came so far
    except OSError:
        return True
    return False
