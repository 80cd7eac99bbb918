"""Reads a JSONL file of questions with the pieces that `read_questions` calls."""

from pathlib import Path

from megatron_rl.prompts.files.row import Render, refuse_messages
from megatron_rl.prompts.files.rows import Rows
from megatron_rl.prompts.jsonl import read_lines_into, require_usable_lines
from megatron_rl.prompts.question import BadRows, CheckedRows, Question


def read_jsonl(
    path: str | Path, bad_rows: BadRows, *, key: str, render: Render = refuse_messages
) -> list[Question]:
    """Read all questions of a file. key: configuration key that names it, for messages."""
    rows = Rows(f"{key}={path}", CheckedRows(bad_rows), render, id_key=key)
    read_lines_into(rows, path, key)
    require_usable_lines(rows)
    return rows.questions
