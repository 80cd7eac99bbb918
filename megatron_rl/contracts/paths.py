"""Checks of paths that a user gives. Every problem is returned as text, never raised."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path


def path_problem(path: str, *, folder: bool) -> str | None:
    """Return why a path is no file that this user can read, or None if it is one.

    folder: check for a directory instead of a file.
    """
    kind = "directory" if folder else "file"
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return f"There is no such {kind}"
    except (OSError, ValueError) as error:
        return _inaccessible(error)
    if folder and not is_folder:
        return "It is a file, not a directory"
    if is_folder and not folder:
        return "There is no such file: it is a directory"
    permissions = os.R_OK | os.X_OK if folder else os.R_OK
    return None if os.access(path, permissions) else f"This user may not read this {kind}"


def new_directory_problem(path: str) -> str | None:
    """Return why no directory can be made at a path, or None if it exists or can be made."""
    try:
        target = Path(path).expanduser()
        existing = next(parent for parent in (target, *target.parents) if parent.exists())
    except (OSError, RuntimeError, ValueError) as error:
        # The name is too long, a folder belongs to another user, or `~user` is unknown.
        return _inaccessible(error)
    if not path:
        return "It names no directory"
    if not existing.is_dir():
        return f"{existing} is a file"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} is not writable for this user"
    if os.statvfs(existing).f_blocks == 0:
        return f"{existing} is on a file system that stores no files"
    return None


def missing_directory(addresses: str) -> str | None:
    """Return the first `file://DIRECTORY` address that is no directory, or None.

    addresses: one address or a list of them, as Hydra takes them. `pkg://` is not checked.
    """
    for address in re.split(r"[\[\],'\" ]+", addresses):
        scheme, _, path = address.rpartition("://")
        if not address or scheme == "pkg":
            continue
        if scheme != "file" or path_problem(path, folder=True):
            return address
    return None


def _inaccessible(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) else error
    return f"It cannot be accessed ({reason})"
