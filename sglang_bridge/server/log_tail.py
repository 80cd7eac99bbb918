"""The end of an engine's log, fit for an error message."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_TAIL_BYTES = 256 * 1024
_LINE_CHARACTERS = 400
_REFUSED_ARGUMENTS = re.compile(r"^[\w. -]+: error: (.+)$", re.MULTILINE)  # what argparse says last
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .+$", re.MULTILINE)


def last_lines(path: Path, *, count: int = 30, secrets: Iterable[str] = ()) -> str:
    """The last `count` lines of a log with every secret blanked out; an empty string if there is no
    log.
    """
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    for secret in secrets:
        text = text.replace(secret, "***")
    lines = text.splitlines()[-count:]
    return "\n".join(
        line if len(line) <= _LINE_CHARACTERS else line[:_LINE_CHARACTERS] + " ..."
        for line in lines
    )


def refused_arguments(log: str) -> str | None:
    """What the server's own parser said against its arguments, or None."""
    said = _REFUSED_ARGUMENTS.findall(log)
    return said[-1] if said else None


def last_exception(log: str) -> str | None:
    """The last line that ends a traceback, or None."""
    said = _EXCEPTION.findall(log)
    return said[-1] if said else None
