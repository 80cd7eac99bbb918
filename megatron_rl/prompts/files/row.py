"""One row of a file: a JSON object with a question, its answer and labels.

Readers of other formats write each row as such an object, so a row means the same in all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import takewhile
from typing import Any, Protocol

import msgspec

from megatron_rl.contracts.prompt import Question, identity_of_text

# No model reads so long a prompt. A file without line ends must not fill the memory.
MAX_ROW_BYTES = 16 * 2**20
EXAMPLE_ROW = '{"prompt": "2+2=", "answer": "4"}'
# A number such as 1e999999999 would fill the memory with zeros.
_MAX_EXPONENT = 999
_EXCERPT = 40  # characters
# Keys of a message that chat templates read.
_MESSAGE_KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")

ChatMessage = Mapping[str, Any]


class Render(Protocol):
    """Renders messages, up to the beginning of the assistant's next one. Raises ValueError."""

    def __call__(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str: ...


def refuse_messages(
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Raise ValueError: the `Render` for a model without a chat template."""
    raise ValueError(
        "`messages` need a chat template, and the model has no such template. Write the text to "
        "`prompt`"
    )


class _Message(msgspec.Struct):
    role: str
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Row(msgspec.Struct):
    """A null is a key that is missing, as in Parquet."""

    prompt: str | None = None
    messages: list[_Message] | None = None
    tools: list[dict[str, Any]] | None = None
    answer: msgspec.Raw = msgspec.Raw(b"null")
    details: msgspec.Raw = msgspec.Raw(b"null")
    response: str | None = None
    id: str | int | None = None
    task: str | None = None
    difficulty: str | int | float | None = None


@dataclass(frozen=True)
class _Conversation:
    """text: the model's input. response: the row's response, "" without one.

    demonstration: the response as the model writes it. problem: why there is none.
    identity: as of `Question`.
    """

    text: str
    response: str
    demonstration: str
    problem: str = ""
    identity: str = ""


def parse_question(
    row: bytes, origin: str, render: Render, *, default_id: str, default_task: str
) -> Question:
    """Parse one row, a JSON object. Raises ValueError with the rule and the remedy.

    origin: where the row is, for messages. default_id, default_task: of a row without these keys.
    """
    if len(row) > MAX_ROW_BYTES:
        raise ValueError(f"the line has more than {MAX_ROW_BYTES} bytes, which is the limit")
    fields = msgspec.json.decode(row, type=_Row)
    if fields.prompt is None and fields.messages is None:
        keys = ", ".join(msgspec.json.decode(row, type=dict[str, msgspec.Raw])) or "no keys"
        raise ValueError(f"the row has neither `prompt` nor `messages`. It has: {keys}")
    conversation = _parse_conversation(fields, render)
    details = _parse_details(bytes(fields.details))
    if bytes(fields.answer) != b"null":
        answer = _parse_answer(bytes(fields.answer))
    elif conversation.response or details:
        answer = conversation.response
    else:
        raise ValueError(
            "`answer` is missing. A row needs an `answer`, a response that contains it, or "
            "`details` for its scorer"
        )
    return Question(
        id=default_id if fields.id is None else str(fields.id),
        text=conversation.text,
        answer=answer,
        task=fields.task or default_task,
        origin=origin,
        difficulty="" if fields.difficulty is None else str(fields.difficulty),
        demonstration=conversation.demonstration,
        demonstration_problem=conversation.problem,
        identity=conversation.identity,
        details=details,
    )


def _parse_conversation(row: _Row, render: Render) -> _Conversation:
    if row.prompt is not None and row.messages is not None:
        raise ValueError("the row has both `prompt` and `messages`. Leave one of them out")
    response = _parse_response(row)
    if row.messages is None:
        return _Conversation(_parse_prompt(row), response, response)
    messages, last_message = _split_messages(row.messages)
    if last_message and response:
        raise ValueError(
            "the row has two responses: `response`, and the assistant's message at the end of "
            "`messages`. Leave one of them out"
        )
    tools = [_without_nulls(tool) for tool in row.tools or ()]
    text = render(messages, tools)
    response = last_message or response
    demonstration = ""
    problem = ""
    try:
        demonstration = _render_response(response, messages, tools, text, render)
    except ValueError as error:
        problem = str(error)
    identity = _identity_of_chat(messages, tools)
    return _Conversation(text, response, demonstration, problem, identity)


def _identity_of_chat(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the texts of messages and tools, which identify a question under every chat template.

    Case and white space do not count, nor do the ids of calls.
    """
    chat = [_without_call_ids(message) for message in messages]
    return json.dumps(_identify_texts([chat, tools]), ensure_ascii=False, sort_keys=True)


def _without_call_ids(message: ChatMessage) -> ChatMessage:
    rest = {name: value for name, value in message.items() if name != "tool_call_id"}
    if "tool_calls" in rest:
        functions = [call.get("function", call) for call in rest["tool_calls"]]
        rest["tool_calls"] = [
            [function["name"], function.get("arguments", {})] for function in functions
        ]
    return rest


def _identify_texts(value: Any) -> Any:
    """Return objects and arrays with all of their texts as `identity_of_text` writes them."""
    if isinstance(value, str):
        return identity_of_text(value)
    if isinstance(value, dict):
        return {name: _identify_texts(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_identify_texts(inner) for inner in value]
    return value


def _render_response(
    response: str,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]],
    prompt: str,
    render: Render,
) -> str:
    """Return what the chat template writes after the prompt for a response, "" without one.

    Raises ValueError if the template writes another prompt before the response.
    """
    if not response:
        return ""
    last_message = {"role": "assistant", "content": response}
    text = render([*messages, last_message], tools, add_generation_prompt=False)
    if not text.startswith(prompt):
        length = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, text, strict=False))
        )
        raise ValueError(
            f"the chat template does not write the response after the prompt: the prompt ends with "
            f"{prompt[length:][-_EXCERPT:]!r}, where the whole conversation has "
            f"{text[length:][:_EXCERPT]!r}. Write the rendered texts to `prompt` and "
            "`response`, or use a template that writes the prompt in both cases"
        )
    return text[len(prompt) :]


def _parse_response(row: _Row) -> str:
    if row.response is None:
        return ""
    if not row.response.strip():
        raise ValueError("`response` is empty. Leave it out or give a text")
    return row.response


def _parse_prompt(row: _Row) -> str:
    prompt = str(row.prompt)
    if row.tools:
        raise ValueError("`tools` need `messages`: `prompt` is the text that the model reads")
    if not prompt.strip():
        raise ValueError("`prompt` is empty. Give the text that the model reads")
    return prompt


def _split_messages(messages: Sequence[_Message]) -> tuple[list[dict[str, Any]], str]:
    """Split off the assistant's message at the end, "" if there is none."""
    dialogue = [_to_dict(message) for message in messages]
    response = ""
    if dialogue and dialogue[-1]["role"] == "assistant":
        last_message = dialogue.pop()
        if last_message.keys() - {"role", "content", "name"}:
            raise ValueError(
                "the assistant's last message has reasoning or tool calls. A demonstration is a "
                "text: write it to `response`, and the chat template renders it"
            )
        response = last_message["content"]
        if not response.strip():
            raise ValueError("the assistant's last message is empty. Leave it out or give a text")
    if not dialogue or dialogue[-1]["role"] == "assistant":
        raise ValueError(
            "`messages` has no message for the assistant to answer. End it with a message of the "
            "user"
        )
    return dialogue, response


def _to_dict(message: _Message) -> dict[str, Any]:
    """Return the keys that a message has. A null is a key that is missing."""
    values = {name: getattr(message, name) for name in _MESSAGE_KEYS}
    if values["tool_calls"]:
        values["tool_calls"] = [_parse_call(call) for call in values["tool_calls"]]
    elif values["content"] is None:
        raise ValueError(
            f"a message of the role {message.role!r} has neither `content` nor `tool_calls`"
        )
    values["content"] = values["content"] or ""
    return {name: value for name, value in values.items() if value is not None and value != []}


def _parse_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, which is what chat templates read."""
    call = _without_nulls(call)
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            '`tool_calls` must hold objects such as {"function": {"name": "add", "arguments": '
            '{"a": 1}}}'
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            values = msgspec.json.decode(arguments, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ValueError(
                f"the arguments of the tool call {function['name']!r} are no JSON object ({error})"
            ) from error
        function["arguments"] = _without_nulls(values)
    return call


def _without_nulls(value: Any) -> Any:
    """Leave out keys whose value is null: Parquet fills the keys that a row lacks with nulls."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


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


def _parse_details(raw: bytes) -> str:
    """Return JSON text, "" for a null. A string holds the JSON text."""
    if raw == b"null":
        return ""
    if raw[:1] != b'"':
        return raw.decode()
    text = msgspec.json.decode(raw, type=str)
    try:
        msgspec.json.decode(text)
    except msgspec.MsgspecError as error:
        raise ValueError(
            f"`details` is a string that holds no JSON text ({error}). Give an object, or JSON text"
        ) from error
    return text


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
