"""Explains errors of the disk, such as a full one, in one sentence."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

_CAUSES = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EFBIG: "the file exceeds the size limit (ulimit -f)",
    errno.EIO: "the disk reports an input/output error",
}


def free_bytes(path: Path) -> int:
    """The free bytes of the disk that holds a path. The path itself need not exist."""
    place = path.absolute()
    folder = next(folder for folder in (place, *place.parents) if folder.exists())
    return shutil.disk_usage(folder).free


def write_problem(
    error: BaseException, where: Path | None = None, *, key: str = "run.root"
) -> str | None:
    """Explain why a file cannot be written. Returns None for all other errors.

    where: the file, for errors that do not name it. key: the setting that chooses its location.
    """
    for link in _chain(error):
        cause = _cause_of(link)
        if cause is None:
            continue
        path = where or (link.filename if isinstance(link, OSError) else None)
        if path:
            problem = f"{path} cannot be written: {cause}"
        else:
            problem = f"a file of the run cannot be written ({link}): {cause}"
        return f"{problem}. Free some space there, or choose another {key}, and start again"
    return None


def _cause_of(error: BaseException) -> str | None:
    number = error.errno if isinstance(error, OSError) else None
    for code, cause in _CAUSES.items():
        # Libraries in Rust only mention `(os error 28)` in their text
        if number == code or f"(os error {code})" in str(error):
            return cause
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and the exceptions that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__
