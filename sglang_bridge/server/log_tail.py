"""The end of an engine's log, shortened for an error message."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_TAIL_BYTES = 256 * 1024
_LINE_CHARACTERS = 400
_PARSER_ERROR = re.compile(r"^[\w. -]+: error: (.+)$", re.MULTILINE)  # argparse's last line
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .+$", re.MULTILINE)


def last_lines(path: Path, *, count: int = 30, secrets: Iterable[str] = (), start: int = 0) -> str:
    """Return the last `count` lines of a log, with every secret blanked out.

    start: the byte where the text begins, after the output of earlier processes. Without a log, the
    text is empty.
    """
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(start, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    for secret in secrets:
        text = text.replace(secret, "***")
    return "\n".join(map(_shorten, text.splitlines()[-count:]))


def argument_error(log: str) -> str | None:
    """The error with which the server's parser refused its arguments, or None."""
    errors = _PARSER_ERROR.findall(log)
    return errors[-1] if errors else None


def last_exception(log: str) -> str | None:
    """The last line that ends a traceback, or None."""
    exceptions = _EXCEPTION.findall(log)
    return exceptions[-1] if exceptions else None


def _shorten(line: str) -> str:
    return line if len(line) <= _LINE_CHARACTERS else f"{line[:_LINE_CHARACTERS]} ..."
