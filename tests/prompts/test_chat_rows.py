"""Rows of chats with tools and tool calls."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from launch.testbed.policies import TWO_DIGIT_ADDITION
from megatron_rl.models.chat_template import ChatTemplate
from megatron_rl.prompts.question import BadRows, PromptDataError
from tests.support.question_files import read_jsonl

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"properties": {"a": {"enum": ["x", None], "default": None}}},
    },
}
CALL = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 2, "b": 0.5}'}}
USER = {"role": "user", "content": "2+2"}
ASSISTANT = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "add", "refusal": None}
TOOLS_FIRST = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %} {% endfor %}"
)


def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    return json.dumps([list(messages), list(tools)])


def read_row(folder: Path, row: dict[str, Any]) -> Any:
    file = folder / "t.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (question,) = read_jsonl(file, BadRows("fail"), key="k", render=render)
    return json.loads(question.text)


def test_tools_and_calls_reach_the_chat_template(tmp_path: Path) -> None:
    row = {"messages": [USER, ASSISTANT, RESULT], "tools": [TOOL], "answer": 4}
    messages, tools = read_row(tmp_path, row)
    assert messages[0] == USER
    function = {"name": "add", "arguments": {"a": 2, "b": 0.5}}
    assert messages[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "r",
        "tool_calls": [{"id": "c1", "function": function}],
    }
    assert messages[2] == {key: value for key, value in RESULT.items() if key != "refusal"}
    parameters = {"properties": {"a": {"enum": ["x", None]}}}
    assert tools == [{"type": "function", "function": {"name": "add", "parameters": parameters}}]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"messages": [USER, ASSISTANT]}, "last message has reasoning or tool calls"),
        ({"messages": [USER | {"content": None}]}, "'user' has neither `content` nor `tool_calls`"),
        (
            {"messages": [USER, ASSISTANT | {"tool_calls": [{"function": {}}]}, RESULT]},
            "`tool_calls` must hold objects such as",
        ),
        (
            {
                "messages": [
                    USER,
                    ASSISTANT | {"tool_calls": [{"function": {"name": "add", "arguments": "a=1"}}]},
                    RESULT,
                ]
            },
            "arguments of the tool call 'add' are no JSON object",
        ),
        ({"tools": "add"}, r"Expected `array \| null`, got `str` - at `\$\.tools`"),
        ({"messages": None, "prompt": "2+2"}, "Expected `array`"),
    ],
)
def test_calls_that_no_template_can_render_are_bad_rows(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    row = {"messages": [USER], "tools": [TOOL], "answer": 4}
    with pytest.raises(PromptDataError, match=rf"t\.jsonl.*(line 1|rows).*{words}"):
        read_row(tmp_path, row | changes)


def test_tools_of_a_prompt_without_messages_are_a_bad_row(tmp_path: Path) -> None:
    with pytest.raises(PromptDataError, match="`tools` need `messages`"):
        read_row(tmp_path, {"prompt": "2+2", "tools": [TOOL], "answer": 4})


def test_a_template_renders_tools_or_refuses_them(tmp_path: Path) -> None:
    directory = shutil.copytree(TWO_DIGIT_ADDITION, tmp_path / "model")
    file = directory / "chat_template.jinja"
    file.write_text(TOOLS_FIRST)
    template = ChatTemplate(directory)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {}}}]}
    text = template.prompt([USER, call], [{"name": "add"}])
    assert text == '{"name": "add"}user: 2+2 assistant: {} '
    assert template.prompt([USER]) == "user: 2+2 "
    file.write_text(TOOLS_FIRST.replace("tools", "documents"))
    with pytest.raises(ValueError, match=r"ignores `tools` \(.*chat_template\.jinja\)"):
        ChatTemplate(directory).prompt([USER], [{"name": "add"}])
