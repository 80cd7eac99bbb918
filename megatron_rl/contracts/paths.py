"""What stands at a path that a user gives: every answer in words, none as an exception."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path


def path_problem(path: str, *, folder: bool) -> str | None:
    """Why there is no file, or no directory, that this user can read; None where there is one."""
    wanted = "directory" if folder else "file"
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return f"There is no such {wanted}"
    except (OSError, ValueError) as error:
        return f"It cannot be looked at ({error.strerror if isinstance(error, OSError) else error})"
    if stat.S_ISDIR(found.st_mode) != folder:
        return (
            "It is a file, not a directory"
            if folder
            else "There is no such file: it is a directory"
        )
    return (
        None
        if os.access(path, os.R_OK | (os.X_OK if folder else 0))
        else f"This user may not read that {wanted}"
    )


def new_directory_problem(path: str) -> str | None:
    """Why no directory can be made at a path; None where there is one, or can be."""
    try:
        folder = Path(path).expanduser()
        blocking = next(parent for parent in (folder, *folder.parents) if parent.exists())
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # a name too long, folders of others, an unknown ~user
        return f"It cannot be looked at ({error.strerror if isinstance(error, OSError) else error})"
    if not path:
        return "It names no directory"
    if not blocking.is_dir():
        return f"{blocking} is a file"
    return (
        None
        if os.access(blocking, os.W_OK | os.X_OK)
        else f"{blocking} is not writable for this user"
    )


def missing_directory(urls: str) -> str | None:
    """The first of `file://DIRECTORY` addresses, as a list or alone, that is none; `pkg://` is not
    looked at.
    """
    for place in re.split(r"[\[\],'\" ]+", urls):
        scheme, _, path = place.rpartition("://")
        if place and scheme != "pkg" and (scheme != "file" or path_problem(path, folder=True)):
            return place
    return None
