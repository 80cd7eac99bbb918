"""Rows of CSV files, written as the JSON objects of a JSONL file."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import msgspec

from megatron_rl.prompts.files.columns import NESTED_KEYS, Columns
from megatron_rl.prompts.files.row import MAX_ROW_BYTES
from megatron_rl.prompts.question import PromptDataError


def read_csv(path: Path, key: str, columns: Columns) -> Iterator[tuple[int, bytes | ValueError]]:
    """Yield the last line of each row, with the row or the reason why it is none.

    The first line names the columns. Values are texts, and an empty one is missing. `messages` and
    `tools` are JSON text.

    key: `key=path` of the data, for messages. Raises `PromptDataError` if the file cannot be read,
    or if it has not the columns of questions.
    """
    csv.field_size_limit(MAX_ROW_BYTES)
    number = 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, strict=True)
            columns.check(list(reader.fieldnames or ()), path, key)
            for row in reader:
                number = reader.line_num
                if None in row:
                    yield number, ValueError("the row has more values than the first line names")
                elif None in row.values():
                    yield number, ValueError("the row has fewer values than the first line names")
                else:
                    yield number, _to_json(row)
    except csv.Error as error:
        raise PromptDataError(
            f"{key}: {path} cannot be read as CSV after line {number} ({error}). Close its quotes, "
            "and write the file again"
        ) from error
    except UnicodeDecodeError as error:
        raise PromptDataError(f"{key}: {path} is not UTF-8 ({error}). Save it as UTF-8") from error
    except OSError as error:
        raise PromptDataError(
            f"{key}: {path} cannot be read ({error.strerror}). Name a file that can be read"
        ) from error


def _to_json(row: dict[str, str]) -> bytes:
    values = {
        name: msgspec.Raw(value.encode()) if name in NESTED_KEYS and _is_json(value) else value
        for name, value in row.items()
        if value
    }
    return msgspec.json.encode(values)


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.MsgspecError:
        return False
    return True
