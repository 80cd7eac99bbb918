"""Questions from JSONL files.

Each line is an object with `prompt` or `messages`, `answer`, `response` and labels.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatron_rl.prompts.files.row import EXAMPLE_ROW, MAX_ROW_BYTES
from megatron_rl.prompts.files.rows import Rows
from megatron_rl.prompts.question import PromptDataError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_FORMAT_REMEDY = f"Write one JSON object a line, such as {EXAMPLE_ROW}"
_UTF_16_BEGINNINGS = (b"\xff\xfe", b"\xfe\xff", b"{\x00", b"\x00{")
_BINARY_FORMATS = {
    b"\x1f\x8b": "compressed with gzip. Decompress it",
    b"\x28\xb5\x2f\xfd": "compressed with Zstandard. Decompress it",
    b"PK\x03\x04": "a ZIP archive. Extract the JSONL file from it",
    b"PAR1": f"a Parquet file. Choose data=parquet. {_FORMAT_REMEDY}, with data=jsonl",
}
_ARRAY_BEGINNING = re.compile(rb"\s*\[\s*(?:\{|$)")


def is_line_id(prompt_id: str) -> bool:
    """Return True if the id was derived from a line number, because the row has no `id`.

    Such an id means another row in another file. In a mixture, the name of the source precedes it.
    """
    key, _, number = prompt_id.rpartition("/")[2].partition(":")
    return key == "data.train_path" and number.isdecimal()


def read_lines_into(
    rows: Rows, path: str | Path, key: str, *, first_number: int = 0, place: str = ""
) -> int:
    """Add the lines of a file, and return the number of its last line.

    first_number: number of rows in the files before it. place: the file's name where the data set
    has several files, for messages. Raises `PromptDataError`.
    """
    last_number = 0
    for number, line in _read_lines(path, key):
        if number == 1:
            _check_format(line, rows.name)
        rows.add(line, first_number + number, f"{path} line {number}", f"{place}line {number}")
        last_number = number
    return first_number + last_number


def require_usable_lines(rows: Rows) -> None:
    """Raise `PromptDataError` without a usable row. It names a format that the file may have."""
    num_bad = rows.checked_rows.num_bad
    if not rows.questions and num_bad:
        if _is_csv(rows.first_bad_row):
            raise PromptDataError(f"{rows.name}: the file seems to be CSV. {_FORMAT_REMEDY}")
        if num_bad > 1 and rows.first_bad_row.strip() == b"{":
            raise PromptDataError(
                f"{rows.name}: the file begins with an object of several lines. {_FORMAT_REMEDY}"
            )
    rows.require_usable()


def _check_format(first_line: bytes, name: str) -> None:
    """Raise `PromptDataError` for other formats: binary files, UTF-16 text and a JSON array."""
    for beginning, problem in _BINARY_FORMATS.items():
        if first_line.startswith(beginning):
            raise PromptDataError(f"{name}: the file is {problem}")
    if first_line.startswith(_UTF_16_BEGINNINGS):
        raise PromptDataError(f"{name}: the file is UTF-16 text. Save it as UTF-8")
    if _ARRAY_BEGINNING.match(first_line):
        raise PromptDataError(f"{name}: the file is a JSON array. {_FORMAT_REMEDY}")


def _is_csv(line: bytes) -> bool:
    is_json = line.lstrip()[:1] in (b"{", b"[")
    return not is_json and any(separator in line for separator in (b",", b";", b"\t"))


def _read_lines(path: str | Path, key: str) -> Iterator[tuple[int, bytes]]:
    """Yield non-empty lines with their numbers. Lines that are too long are truncated."""
    try:
        with Path(path).open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(MAX_ROW_BYTES + 1)
                if not line:
                    return
                if len(line) > MAX_ROW_BYTES:
                    _skip_rest_of_line(file, line)
                content = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                if len(line) > MAX_ROW_BYTES or content.strip():
                    yield number, content
    except OSError as error:
        raise PromptDataError(
            f"{key}={path}: the file cannot be read ({error.strerror}). Name a JSONL file, or "
            "choose an embedded task with data=column_addition"
        ) from error


def _skip_rest_of_line(file: BinaryIO, piece: bytes) -> None:
    while len(piece) > MAX_ROW_BYTES and not piece.endswith(b"\n"):
        piece = file.readline(MAX_ROW_BYTES + 1)
