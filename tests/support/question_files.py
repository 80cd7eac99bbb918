"""Reads JSONL files of questions with the pieces of `read_questions`, and writes Parquet files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet

from megatron_rl.contracts.prompt import ROW_KEYS, Question
from megatron_rl.prompts.files.row import Render, refuse_messages
from megatron_rl.prompts.files.rows import Rows
from megatron_rl.prompts.jsonl import read_lines_into, require_usable_lines
from megatron_rl.prompts.question import BadRows, CheckedRows


def read_jsonl(
    path: str | Path, bad_rows: BadRows, *, key: str, render: Render = refuse_messages
) -> list[Question]:
    """Read all questions of a file. key: configuration key that names it, for messages."""
    rows = Rows(f"{key}={path}", CheckedRows(bad_rows), render, id_key=key)
    read_lines_into(rows, path, key)
    require_usable_lines(rows)
    return rows.questions


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a Parquet file. Nested values become JSON text, so that nothing is added."""
    names = [name for name in ROW_KEYS if any(name in row for row in rows)]
    columns = {name: [_to_cell(row.get(name)) for row in rows] for name in names}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def _to_cell(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()
