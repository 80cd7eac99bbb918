"""Questions from JSONL files: one object per line with `prompt` or `messages`, `answer`, `response`
and labels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from megatron_rl.prompts.question import BadRows, PromptDataError, Question

_MOST_BYTES = (
    16 * 2**20
)  # of a line; no model reads so long a prompt, and a file without line ends fills no memory
_MOST_EXPONENT = 999  # of an answer; 1e999999999 would fill the memory with zeros


Render = Callable[[Sequence[Mapping[str, str]]], str]
"""The text of messages up to where the assistant's next one begins. Raises ValueError."""


def refuse_messages(messages: Sequence[Mapping[str, str]]) -> str:
    """The `Render` of whoever has no chat template."""
    raise ValueError("it holds `messages`, and there is no chat template here")


def is_line(prompt_id: str) -> bool:
    """Whether a training row without an `id` is called so: by its line, which means nothing in
    another file.
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
    """All questions of a file. key: the configuration key that names the file (`data.train_path`),
    for messages.

    render: of rows with `messages`. Raises `PromptDataError` when the file cannot be read or holds
    no usable row.
    """
    questions: list[Question] = []
    line_of_id: dict[str, int] = {}
    for number, line in _lines(path, key):
        origin = f"{path} line {number}"
        if len(line) > _MOST_BYTES:
            bad_rows.report(origin, f"is longer than {_MOST_BYTES} bytes")
            continue
        try:
            question = _question(line, origin, render, default_id=f"{key}:{number}")
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
            '{"prompt": "2+2=", "answer": "4"}'
            + "".join(f"\n  {example}" for example in bad_rows.examples[:3])
        )
    return questions


def _lines(path: str | Path, key: str) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers; of one that is too long only so much that this
    can be seen.
    """
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


def _question(line: bytes, origin: str, render: Render, default_id: str) -> Question:
    row = msgspec.json.decode(line, type=_Row)
    text, response = _conversation(row, render)
    if isinstance(row.answer, UnsetType) and not response:
        raise ValueError("`answer` is missing, and there is no response in which it could be found")
    return Question(
        id=default_id if row.id is None else str(row.id),
        text=text,
        answer=response if isinstance(row.answer, UnsetType) else _answer(bytes(row.answer)),
        task=row.task,
        origin=origin,
        difficulty=str(row.difficulty),
        demonstration=response,
    )


def _conversation(row: _Row, render: Render) -> tuple[str, str]:
    """What the model reads, and the response that the row shows, if any."""
    if (row.prompt is UNSET) == (row.messages is UNSET):
        raise ValueError("`prompt` or `messages` is needed, one of them")
    if row.response is not UNSET and not row.response.strip():
        raise ValueError("`response` is empty")
    if row.prompt is not UNSET and not row.prompt.strip():
        raise ValueError("`prompt` is empty")
    response = "" if row.response is UNSET else row.response
    if row.messages is UNSET:
        return str(row.prompt), response
    messages = [{"role": message.role, "content": message.content} for message in row.messages]
    if messages and messages[-1]["role"] == "assistant":
        if response:
            raise ValueError("`response` is given, and `messages` end with one of the assistant")
        response = messages.pop()["content"]
        if not response.strip():
            raise ValueError("the assistant's last message is empty")
    if not messages or messages[-1]["role"] == "assistant":
        raise ValueError("`messages` hold nothing that the assistant could answer")
    return render(messages), response


def _answer(raw: bytes) -> str:
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
        raise ValueError("`answer` is empty")
    return answer


def _plain_digits(number: str) -> str:
    """A JSON number without its exponent, exactly."""
    _, _, exponent = number.lower().partition("e")
    if not exponent:
        return number
    if len(exponent.lstrip("+-0")) > len(str(_MOST_EXPONENT)):
        raise ValueError(
            f"`answer`: the exponent of {number[:40]} exceeds {_MOST_EXPONENT}; write the digits out"
        )
    return format(Decimal(number), "f")
