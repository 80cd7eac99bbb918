"""Directories on a node's own disk that belong to one process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "megatron_rl_weights-"
_LOCK = "lock"


@contextlib.contextmanager
def open_scratch() -> Iterator[Path]:
    """Make an empty directory below the system's one for temporary files, and remove it at the end.

    Directories of processes that were killed are removed as well: nobody holds their lock any more.
    """
    base = Path(tempfile.gettempdir())
    _remove_orphans(base)
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    descriptor = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        content = path / "copy"
        content.mkdir()
        yield content
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _remove_orphans(base: Path) -> None:
    for path in base.glob(f"{_PREFIX}*"):
        # Another user's directory cannot be opened, and one that is just being made has no lock
        with contextlib.suppress(OSError):
            descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
