"""Questions from JSONL files.

Each line is an object with `prompt` or `messages`, `answer`, `response` and labels.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import UNSET, UnsetType

from megatron_rl.prompts.question import BadRows, CheckedRows, PromptDataError, Question

# No model reads so long a prompt. A file without line ends must not fill the memory.
_MAX_LINE_BYTES = 16 * 2**20
# A number such as 1e999999999 would fill the memory with zeros.
_MAX_EXPONENT = 999
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_EXAMPLE_ROW = '{"prompt": "2+2=", "answer": "4"}'
_FORMAT_REMEDY = f"Write one JSON object a line, such as {_EXAMPLE_ROW}"
_UTF_16_BEGINNINGS = (b"\xff\xfe", b"\xfe\xff", b"{\x00", b"\x00{")
_BINARY_FORMATS = {
    b"\x1f\x8b": "compressed with gzip. Decompress it",
    b"\x28\xb5\x2f\xfd": "compressed with Zstandard. Decompress it",
    b"PK\x03\x04": "a ZIP archive. Extract the JSONL file from it",
    b"PAR1": f"a Parquet file. {_FORMAT_REMEDY}",
}
_ARRAY_BEGINNING = re.compile(rb"\s*\[\s*(?:\{|$)")


Render = Callable[[Sequence[Mapping[str, str]]], str]
"""Renders messages up to the beginning of the assistant's next message. Raises ValueError."""


def refuse_messages(messages: Sequence[Mapping[str, str]]) -> str:
    """Raise ValueError: the `Render` for a model without a chat template."""
    raise ValueError(
        "`messages` need a chat template, and the model has no such template. Write the text to "
        "`prompt`"
    )


def is_line_id(prompt_id: str) -> bool:
    """Return True if the id was derived from a line number, because the row has no `id`.

    Such an id means another row in another file.
    """
    key, _, number = prompt_id.partition(":")
    return key == "data.train_path" and number.isdecimal()


class _Message(msgspec.Struct):
    role: str
    content: str


class _Row(msgspec.Struct):
    prompt: str | UnsetType = UNSET
    messages: list[_Message] | UnsetType = UNSET
    answer: msgspec.Raw | UnsetType = UNSET
    response: str | UnsetType = UNSET
    id: str | int | None = None
    task: str = "jsonl"
    difficulty: str | int | float = ""


def read_jsonl(
    path: str | Path, bad_rows: BadRows, *, key: str, render: Render = refuse_messages
) -> list[Question]:
    """Read all questions of a file.

    key: configuration key that names the file (`data.train_path`), for messages.
    render: renders rows with `messages`.

    Raises `PromptDataError` if the file cannot be read or has no usable row.
    """
    rows = _Rows(f"{key}={path}", CheckedRows(bad_rows))
    for number, line in _read_lines(path, key):
        if number == 1:
            _check_format(line, rows.name)
        origin = f"{path} line {number}"
        try:
            question = _parse_question(line, origin, render, default_id=f"{key}:{number}")
            _check_unique(question, number, rows.line_by_id)
        except ValueError as error:
            rows.add_bad(origin, str(error), line)
        except RecursionError:
            rows.add_bad(origin, "its arrays or objects are nested too deeply", line)
        else:
            rows.add(question)
    rows.require_usable()
    return rows.questions


@dataclass
class _Rows:
    """Collects the questions of a file.

    name: `key=path` of the file, for messages.
    """

    name: str
    checked_rows: CheckedRows
    questions: list[Question] = field(default_factory=list)
    line_by_id: dict[str, int] = field(default_factory=dict)
    _first_line: bytes = b""

    def add(self, question: Question) -> None:
        """Add a usable row. Raises as `CheckedRows.add_usable` does."""
        self.checked_rows.add_usable()
        self.questions.append(question)

    def add_bad(self, origin: str, reason: str, line: bytes) -> None:
        """Add a bad row. Raises as `CheckedRows.add_bad` does."""
        self._first_line = self._first_line or line
        self.checked_rows.add_bad(origin, reason)

    def require_usable(self) -> None:
        """Raise `PromptDataError` without a usable row."""
        if self.questions:
            return
        num_bad = self.checked_rows.num_bad
        if not num_bad:
            raise PromptDataError(
                f"{self.name}: the file is empty. Each line must be an object such as "
                f"{_EXAMPLE_ROW}"
            )
        if _is_csv(self._first_line):
            raise PromptDataError(f"{self.name}: the file seems to be CSV. {_FORMAT_REMEDY}")
        if num_bad > 1 and self._first_line.strip() == b"{":
            raise PromptDataError(
                f"{self.name}: the file begins with an object of several lines. {_FORMAT_REMEDY}"
            )
        raise PromptDataError(
            f"{self.name}: none of its {num_bad} rows is usable. Each line must be an object such "
            f"as {_EXAMPLE_ROW}{self.checked_rows.examples}"
        )


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


def _check_unique(question: Question, number: int, line_by_id: dict[str, int]) -> None:
    first_number = line_by_id.setdefault(question.id, number)
    if first_number != number:
        raise ValueError(
            f"id {question.id!r} is already used in line {first_number}. Ids must be unique"
        )


def _read_lines(path: str | Path, key: str) -> Iterator[tuple[int, bytes]]:
    """Yield non-empty lines with their numbers. Lines that are too long are truncated."""
    try:
        with Path(path).open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(_MAX_LINE_BYTES + 1)
                if not line:
                    return
                if len(line) > _MAX_LINE_BYTES:
                    _skip_rest_of_line(file, line)
                content = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                if len(line) > _MAX_LINE_BYTES or content.strip():
                    yield number, content
    except OSError as error:
        raise PromptDataError(
            f"{key}={path}: the file cannot be read ({error.strerror}). Name a JSONL file, or "
            "choose an embedded task with data=column_addition"
        ) from error


def _skip_rest_of_line(file: BinaryIO, piece: bytes) -> None:
    while len(piece) > _MAX_LINE_BYTES and not piece.endswith(b"\n"):
        piece = file.readline(_MAX_LINE_BYTES + 1)


def _parse_question(line: bytes, origin: str, render: Render, default_id: str) -> Question:
    """Parse one row. Raises ValueError with the rule and the remedy."""
    if len(line) > _MAX_LINE_BYTES:
        raise ValueError(f"the line has more than {_MAX_LINE_BYTES} bytes, which is the limit")
    row = msgspec.json.decode(line, type=_Row)
    if row.prompt is UNSET and row.messages is UNSET:
        keys = ", ".join(msgspec.json.decode(line, type=dict[str, msgspec.Raw])) or "no keys"
        raise ValueError(f"the row has neither `prompt` nor `messages`. It has: {keys}")
    text, response = _parse_conversation(row, render)
    if not isinstance(row.answer, UnsetType):
        answer = _parse_answer(bytes(row.answer))
    elif response:
        answer = response
    else:
        raise ValueError(
            "`answer` is missing. A row needs an `answer`, or a response that contains it"
        )
    return Question(
        id=default_id if row.id is None else str(row.id),
        text=text,
        answer=answer,
        task=row.task,
        origin=origin,
        difficulty=str(row.difficulty),
        demonstration=response,
    )


def _parse_conversation(row: _Row, render: Render) -> tuple[str, str]:
    """Return the model's input and the row's response, "" without a response."""
    if row.prompt is not UNSET and row.messages is not UNSET:
        raise ValueError("the row has both `prompt` and `messages`. Leave one of them out")
    response = "" if row.response is UNSET else row.response
    if row.response is not UNSET and not response.strip():
        raise ValueError("`response` is empty. Leave it out or give a text")
    if isinstance(row.messages, UnsetType):
        prompt = str(row.prompt)
        if not prompt.strip():
            raise ValueError("`prompt` is empty. Give the text that the model reads")
        return prompt, response
    messages, last_message = _split_messages(row.messages)
    if last_message and response:
        raise ValueError(
            "the row has two responses: `response`, and the assistant's message at the end of "
            "`messages`. Leave one of them out"
        )
    return render(messages), last_message or response


def _split_messages(messages: Sequence[_Message]) -> tuple[list[dict[str, str]], str]:
    """Split off the assistant's message at the end, "" if there is none."""
    dialogue = [{"role": message.role, "content": message.content} for message in messages]
    response = ""
    if dialogue and dialogue[-1]["role"] == "assistant":
        response = dialogue.pop()["content"]
        if not response.strip():
            raise ValueError("the assistant's last message is empty. Leave it out or give a text")
    if not dialogue or dialogue[-1]["role"] == "assistant":
        raise ValueError(
            "`messages` has no message for the assistant to answer. End it with a message of the "
            "user"
        )
    return dialogue, response


def _parse_answer(raw: bytes) -> str:
    first = raw[:1]
    if first == b'"':
        answer = msgspec.json.decode(raw, type=str)
    elif first.isdigit() or first == b"-":
        answer = _plain_digits(raw.decode("ascii"))
    else:
        raise ValueError(
            f"`answer` must be a string or a number, got {raw[:40].decode('utf-8', 'replace')}"
        )
    if not answer.strip():
        raise ValueError("`answer` is empty. Give the reference answer")
    return answer


def _plain_digits(number: str) -> str:
    """Return a JSON number without its exponent, exactly."""
    _, _, exponent = number.lower().partition("e")
    if not exponent:
        return number
    if len(exponent.lstrip("+-0")) > len(str(_MAX_EXPONENT)):
        raise ValueError(
            f"`answer`: the exponent of {number[:40]} exceeds {_MAX_EXPONENT}. Write the digits out"
        )
    return format(Decimal(number), "f")
