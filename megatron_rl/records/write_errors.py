"""Files of a run that cannot be written end it with one sentence, wherever they are written."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.contracts.exit_codes import ExitCode, Failure

_CAUSES = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EFBIG: "files may not be so large here (ulimit -f)",
    errno.EIO: "the disk does not work",
}


class WriteFailed(Failure):
    """A file of the run cannot be written."""

    exit_code = ExitCode.CANNOT_WRITE


def free_bytes(path: Path) -> int:
    """What is free on the disk where a path lies, or would lie: it need not exist."""
    place = path.absolute()
    return shutil.disk_usage(
        next(folder for folder in (place, *place.parents) if folder.exists())
    ).free


def write_problem(
    error: BaseException, where: Path | None = None, *, key: str = "run.root"
) -> str | None:
    """Why a file cannot be written, if that is what an exception says; None for all others.

    where: what was being written, for errors that do not name it. key: the setting that says where.
    Libraries in Rust say `(os error 28)` in their text.
    """
    for link in _chain(error):
        known = link.errno if isinstance(link, OSError) else None
        number = next((n for n in _CAUSES if n == known or f"(os error {n})" in str(link)), None)
        if number is not None:
            path = where or (link.filename if isinstance(link, OSError) else None)
            named = (
                f"{path} cannot be written"
                if path
                else f"a file of the run cannot be written ({link})"
            )
            return f"{named}: {_CAUSES[number]}. Make room there, or give another {key}, and start again"
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__
