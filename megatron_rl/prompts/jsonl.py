"""Questions from JSONL files: one object per line with `prompt`, `answer` and optional `id`, `task`, `difficulty`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import msgspec

from megatron_rl.prompts.question import BadRows, PromptDataError, Question

_MOST_BYTES = 16 * 2**20  # of a line; no model reads so long a prompt, and a file without line ends fills no memory
_MOST_EXPONENT = 999  # of an answer; 1e999999999 would fill the memory with zeros


class _Row(msgspec.Struct):
    prompt: str
    answer: msgspec.Raw
    id: str | int | None = None
    task: str = "jsonl"
    difficulty: str | int | float = ""


def read_jsonl(path: str | Path, bad_rows: BadRows, *, key: str) -> list[Question]:
    """All questions of a file. key: the configuration key that names the file (`data.train_path`), for messages.

    Raises `PromptDataError` when the file cannot be read or holds no usable row.
    """
    questions: list[Question] = []
    line_of_id: dict[str, int] = {}
    for number, line in _lines(path, key):
        origin = f"{path} line {number}"
        if len(line) > _MOST_BYTES:
            bad_rows.report(origin, f"is longer than {_MOST_BYTES} bytes")
            continue
        try:
            question = _question(line, origin, default_id=f"{key}:{number}")
        except ValueError as error:
            bad_rows.report(origin, str(error))
            continue
        except RecursionError:
            bad_rows.report(origin, "its arrays or objects are nested too deeply")
            continue
        first = line_of_id.setdefault(question.id, number)
        if first == number:
            questions.append(question)
        else:
            bad_rows.report(origin, f"id {question.id!r} is already used in line {first}")
    if not questions:
        raise PromptDataError(
            f"{key}={path}: no usable row among {bad_rows.count} bad ones. Each line must be an object such as "
            '{"prompt": "2+2=", "answer": "4"}' + "".join(f"\n  {example}" for example in bad_rows.examples[:3])
        )
    return questions


def _lines(path: str | Path, key: str) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers; of one that is too long only so much that this can be seen."""
    try:
        with Path(path).open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(_MOST_BYTES + 1)
                if not line:
                    return
                piece = line
                while len(piece) > _MOST_BYTES and not piece.endswith(b"\n"):
                    piece = file.readline(_MOST_BYTES + 1)
                content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if len(line) > _MOST_BYTES or content.strip():
                    yield number, content
    except OSError as error:
        raise PromptDataError(
            f"{key}={path}: cannot be read ({error.strerror}). Name a JSONL file, or choose an embedded task with "
            "data=column_addition"
        ) from error


def _question(line: bytes, origin: str, default_id: str) -> Question:
    row = msgspec.json.decode(line, type=_Row)
    if not row.prompt.strip():
        raise ValueError("`prompt` is empty")
    return Question(
        id=default_id if row.id is None else str(row.id),
        text=row.prompt,
        answer=_answer(bytes(row.answer)),
        task=row.task,
        origin=origin,
        difficulty=str(row.difficulty),
    )


def _answer(raw: bytes) -> str:
    first = raw[:1]
    if first == b'"':
        answer = msgspec.json.decode(raw, type=str)
    elif first.isdigit() or first == b"-":
        answer = _plain_digits(raw.decode("ascii"))
    else:
        raise ValueError(f"`answer` must be a string or a number, got {raw[:40].decode('utf-8', 'replace')}")
    if not answer.strip():
        raise ValueError("`answer` is empty")
    return answer


def _plain_digits(number: str) -> str:
    """A JSON number without its exponent, exactly."""
    _, _, exponent = number.lower().partition("e")
    if not exponent:
        return number
    if len(exponent.lstrip("+-0")) > len(str(_MOST_EXPONENT)):
        raise ValueError(f"`answer`: the exponent of {number[:40]} exceeds {_MOST_EXPONENT}; write the digits out")
    return format(Decimal(number), "f")
