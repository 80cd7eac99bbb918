"""Collects the rows of one data set, which may lie in several files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from megatron_rl.contracts.prompt import Question
from megatron_rl.prompts.files.columns import Columns
from megatron_rl.prompts.files.row import EXAMPLE_ROW, Render, parse_question
from megatron_rl.prompts.question import CheckedRows, PromptDataError

DEFAULT_TASK = "jsonl"


@dataclass
class Rows:
    """Parses rows and collects their questions.

    name: `key=path` of the data, for messages.
    id_key: a row without an id is called `id_key:number`.
    questions: the questions of all usable rows.
    columns: where a row has these keys.
    first_bad_row: the first row that is not usable, b"" without one.
    """

    name: str
    checked_rows: CheckedRows
    render: Render
    id_key: str
    task: str = DEFAULT_TASK
    columns: Columns = field(default_factory=Columns)
    questions: list[Question] = field(default_factory=list)
    first_bad_row: bytes = b""
    _place_by_id: dict[str, str] = field(default_factory=dict, init=False)
    _unseen_keys: set[str] = field(init=False)  # whose column has no value so far

    def __post_init__(self) -> None:
        self._unseen_keys = set(self.columns.names)

    def add(self, row: bytes, number: int, origin: str, place: str) -> None:
        """Add the row of a number, a JSON object.

        origin: file and place of the row, for messages. place: where it is in the data set.
        Raises as `CheckedRows.add_bad` does.
        """
        try:
            renamed_row = self.columns.rename(row)
            question = parse_question(
                renamed_row,
                origin,
                self.render,
                default_id=f"{self.id_key}:{number}",
                default_task=self.task,
            )
            self._check_unique(question, place)
        except ValueError as error:
            self.add_bad(origin, self.columns.explain(str(error)), row)
        except RecursionError:
            self.add_bad(origin, "its arrays or objects are nested too deeply", row)
        else:
            if self._unseen_keys:
                values = msgspec.json.decode(renamed_row, type=dict[str, Any]).items()
                self._unseen_keys -= {key for key, value in values if value is not None}
            self.checked_rows.add_usable()
            self.questions.append(question)

    def add_bad(self, origin: str, reason: str, row: bytes = b"") -> None:
        """Add a bad row. Raises as `CheckedRows.add_bad` does."""
        self.first_bad_row = self.first_bad_row or row
        self.checked_rows.add_bad(origin, reason)

    def require_usable(self) -> None:
        """Raise `PromptDataError` without a usable row, or if a named column has no value."""
        if self.questions:
            for key in sorted(self._unseen_keys):
                raise PromptDataError(
                    f"{self.columns.setting}.{key}={self.columns.names[key]}: no row of "
                    f"{self.name} has a value in this column. Correct its name, or leave the "
                    "setting out"
                )
            return
        num_bad = self.checked_rows.num_bad
        if not num_bad:
            raise PromptDataError(
                f"{self.name}: the file is empty. Each line must be an object such as {EXAMPLE_ROW}"
            )
        raise PromptDataError(
            f"{self.name}: none of its {num_bad} rows is usable. Each line must be an object such "
            f"as {EXAMPLE_ROW}{self.checked_rows.examples}"
        )

    def _check_unique(self, question: Question, place: str) -> None:
        first_place = self._place_by_id.setdefault(question.id, place)
        if first_place != place:
            raise ValueError(
                f"id {question.id!r} is already used in {first_place}. Ids must be unique"
            )
