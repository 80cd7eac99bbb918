"""Reads the questions of a file or folder in any of the supported formats."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.contracts.prompt import Question
from megatron_rl.prompts.files.columns import Columns
from megatron_rl.prompts.files.csv_rows import read_csv
from megatron_rl.prompts.files.folders import files_of_folder
from megatron_rl.prompts.files.row import Render, refuse_messages
from megatron_rl.prompts.files.rows import DEFAULT_TASK, Rows
from megatron_rl.prompts.files.tables import RowOrProblem, read_arrow_stream, read_parquet
from megatron_rl.prompts.jsonl import read_lines_into, require_usable_lines
from megatron_rl.prompts.question import BadRows, CheckedRows, PromptDataError

FILE_SOURCES = ("jsonl", "csv", "parquet", "hf_dataset")
_PARQUET_BEGINNING = b"PAR1"


@dataclass(frozen=True)
class DataLocation:
    """A file or folder of questions.

    key: configuration key that names it, for messages. split: of a folder with several splits.
    side: `train_path` or `eval_path`, by which rows without an id are called.
    columns: where a row has its keys. task: of rows that name none.
    """

    path: str
    key: str
    split: str | None = None
    side: str = "eval_path"
    columns: Columns = field(default_factory=Columns)
    task: str = DEFAULT_TASK

    @property
    def name(self) -> str:
        return f"{self.key}={self.path}"

    @property
    def files(self) -> list[Path]:
        """All files, in the order of their rows. Raises `PromptDataError`."""
        path = Path(self.path)
        return files_of_folder(path, self.split, self.name) if path.is_dir() else [path]


def read_questions(
    location: DataLocation, bad_rows: BadRows, *, render: Render = refuse_messages
) -> list[Question]:
    """Read all questions of a file or folder.

    Equal rows give equal questions in every format. A row without an id is called by its number:
    the line of a JSONL file, or the row of a table, counted over all files of the data set.

    Raises `PromptDataError` if a file cannot be read, or if there is no usable row.
    """
    rows = Rows(
        location.name,
        CheckedRows(bad_rows),
        render,
        id_key=f"data.{location.side}",
        columns=location.columns,
        task=location.task,
    )
    files = location.files
    number = 0
    # Files of different folders may have the same name.
    parent = os.path.commonpath([file.parent for file in files])
    for file in files:
        place = f"{file.relative_to(parent)} " if len(files) > 1 else ""
        if _is_table(file) or file.suffix.lower() == ".csv":
            number = _add_rows(rows, file, number, place)
        else:
            number = read_lines_into(rows, file, location.key, first_number=number, place=place)
    require_usable_lines(rows)
    return rows.questions


def digest_of(location: DataLocation) -> str:
    """Return the SHA-256 of a file, or of the digests of several files.

    Raises `PromptDataError` if a file cannot be read.
    """
    digests = [_file_digest(file, location.name) for file in location.files]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _add_rows(rows: Rows, file: Path, number: int, place: str) -> int:
    """Add the rows of a table or of a CSV file, and return the number of its last row."""
    for label, row in _read_rows(file, rows):
        number += 1
        origin = f"{file} {label}"
        if isinstance(row, ValueError):
            rows.add_bad(origin, str(row))
        else:
            rows.add(row, number, origin, f"{place}{label}")
    return number


def _read_rows(file: Path, rows: Rows) -> Iterator[tuple[str, RowOrProblem]]:
    """Yield the place of each row in its file, and the row."""
    if not _is_table(file):
        for line, row in read_csv(file, rows.name, rows.columns):
            yield f"line {line}", row
        return
    read = read_arrow_stream if file.suffix == ".arrow" else read_parquet
    for number, row in enumerate(read(file, rows.name, rows.columns), 1):
        yield f"row {number}", row


def _is_table(file: Path) -> bool:
    """Return True for tables. A file that cannot be opened is left to the reader of lines."""
    if file.suffix in (".arrow", ".parquet"):
        return True
    try:
        with file.open("rb") as stream:
            return stream.read(len(_PARQUET_BEGINNING)) == _PARQUET_BEGINNING
    except OSError:
        return False


def _file_digest(file: Path, key: str) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise PromptDataError(
            f"{key}: the file cannot be read ({error.strerror}). Name a file that can be read"
        ) from error
