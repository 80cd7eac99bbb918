"""Rows of chats with tools and tool calls, and demonstrations in chats."""

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.contracts.prompt import Prompt, Question
from megatron_rl.environments.demonstration import Demonstration
from megatron_rl.models.chat_template import ChatTemplate
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts.factory import PromptBuilder
from megatron_rl.prompts.question import BadRows, PromptDataError
from megatron_rl.prompts.split import hold_out, keep_apart
from tests.support.policies import TWO_DIGIT_ADDITION
from tests.support.question_files import read_jsonl
from tests.support.scripted_model import ScriptedModel, open_episode

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


def render(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    add_generation_prompt: bool = True,
) -> str:
    return json.dumps([list(messages), list(tools)])


def read_row(folder: Path, row: dict[str, Any]) -> Any:
    file = folder / "t.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (question,) = read_jsonl(file, BadRows("fail"), key="k", render=render)
    return json.loads(question.text)


def test_arguments_of_a_call_are_the_same_as_text_and_as_an_object(tmp_path: Path) -> None:
    histories = []
    for arguments in ('{"a": null, "b": {"c": null}}', {"a": None, "b": {"c": None}}):
        call = {"function": {"name": "add", "arguments": arguments}}
        row = {"messages": [USER, ASSISTANT | {"tool_calls": [call]}, RESULT], "answer": 4}
        histories.append(read_row(tmp_path, row))
    assert histories[0] == histories[1]


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
        ({"messages": None, "prompt": "2+2"}, "`tools` need `messages`"),
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


BEGINS = "{% for m in messages %}{% if m.role == 'assistant' %}a="
PLAIN = BEGINS + "{{ m.content }}<eos> {% else %}{{ m.role }}={{ m.content }}<eos> {% endif %}"
PLAIN += "{% endfor %}{% if add_generation_prompt %}a={% endif %}"
THOUGHT = "{% if loop.last %}think{% endif %}"
OPENS = PLAIN.replace("%}a={% endif", "%}a=think{% endif")
DEMONSTRATIONS = [
    (PLAIN, "4", "4<eos>"),
    (PLAIN, " 4  ", " 4  <eos>"),
    (
        PLAIN.replace("{{ m.content }}<eos> {% else", "{{ m.content | trim }}<eos> {% else"),
        " 4  ",
        "4<eos>",
    ),
    # Qwen3: an empty thought before the last message
    (PLAIN.replace(BEGINS, BEGINS + THOUGHT), "4", "think4<eos>"),
    # Qwen3-Thinking-2507: the prompt opens the thought, and the last message closes it
    (OPENS.replace(BEGINS, BEGINS + "think/think"), "4", "/think4<eos>"),
    (PLAIN.replace("}}<eos> {% else", "}} <eos> {% else"), "4", "4 <eos>"),
    (PLAIN.replace("<eos> {% else", "{{ eos_token }}{% else"), "4", "4<eos>"),
    # DeepSeek-R1: the prompt opens a thought that the conversation does not have
    (OPENS, "4", r"prompt ends with 'think', where the whole conversation has '4<eos> '"),
    (PLAIN.replace("a={% endif", "b={% endif"), "4", r"prompt ends with 'b=', .* has 'a=4<eos> '"),
    ("{{ messages | length }}" + PLAIN, "4", r"ends with '1user=2\+2<eos> a='.* has '2user"),
    (PLAIN.replace("<eos> {% else", "<pad> {% else"), "4", r"'<pad>', which is no end-of-sequence"),
    (PLAIN.replace("<eos> {% else", "<eos> yes{% else"), "4", r"goes on after its end.*yes"),
    (PLAIN.replace(BEGINS, BEGINS + "{{ raise_exception('no answers') }}"), "4", "no answers"),
    (PLAIN, "Ü4", "no token for 'Ü'"),
    (PLAIN, "4<eos>", "no token for '<'$"),  # text, not the end of the response
]


KEYS = pytest.mark.parametrize("key", ["messages", "response"])


def read_demonstration(
    folder: Path, template: str, content: str, key: str
) -> tuple[Path, Callable[..., list[Prompt]]]:
    """Return the model's folder and a function that builds the prompts of one row."""
    directory = shutil.copytree(TWO_DIGIT_ADDITION, folder / "model")
    (directory / "chat_template.jinja").write_text(template)
    row: dict[str, Any] = {"messages": [USER], "response": content}
    if key == "messages":
        row = {"messages": [USER, {"role": "assistant", "content": content}]}
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    bad_rows = BadRows("fail")
    questions = read_jsonl(file, bad_rows, key="k", render=ChatTemplate(directory).prompt)
    split = keep_apart([], questions, bad_rows)
    tokenizer = Tokenizer.from_directory(directory)
    builder = PromptBuilder(tokenizer, 64, bad_rows, split)

    def build(*, demonstration: bool = False) -> list[Prompt]:
        check = partial(Demonstration().check, tokenizer=tokenizer, max_new_tokens=64)
        return builder.build(
            questions, "none", check_demonstration=check if demonstration else None
        )

    return directory, build


@KEYS
@pytest.mark.parametrize(
    ("template", "content", "expectation"), [d for d in DEMONSTRATIONS if d[2].endswith("<eos>")]
)
def test_demonstrations_are_the_templates_text(
    tmp_path: Path, template: str, content: str, expectation: str, key: str
) -> None:
    directory, build = read_demonstration(tmp_path, template, content, key)
    (prompt,) = build(demonstration=True)
    tokenizer = Tokenizer.from_directory(directory)
    episode = open_episode(
        ScriptedModel([]), routes=None, prompt=prompt, tokenizer=tokenizer, budget=64
    )
    asyncio.run(Demonstration().play(episode))
    _, response = (segment.tokens.tolist() for segment in episode.rollout().segments)
    conversation = [USER, {"role": "assistant", "content": content}]
    whole = tokenizer.encode(
        ChatTemplate(directory).render(conversation, add_generation_prompt=False)
    )
    assert list(whole).index(1, len(prompt.token_ids)) + 1 == len(prompt.token_ids) + len(response)
    assert (*prompt.token_ids, *response) == whole[: len(prompt.token_ids) + len(response)]
    assert tuple(response) == tokenizer.encode(expectation)
    assert episode.text == tokenizer.decode(response)


@KEYS
@pytest.mark.parametrize(
    ("template", "content", "words"), [d for d in DEMONSTRATIONS if not d[2].endswith("<eos>")]
)
def test_demonstrations_that_the_template_writes_otherwise_are_bad_rows(
    tmp_path: Path, template: str, content: str, words: str, key: str
) -> None:
    _, build = read_demonstration(tmp_path, template, content, key)
    with pytest.raises(PromptDataError, match=words):
        build(demonstration=True)
    assert len(build()) == 1  # only supervised training needs the demonstration


SHORT = "{% for m in messages %}{{ m.content }} {% endfor %}"
LAST = "{{ (messages | last).content }}="
TEMPLATES = (PLAIN, SHORT, LAST)


def read_chats(
    folder: Path, rows: Sequence[Mapping[str, Any]], template: str = PLAIN
) -> list[Question]:
    directory = folder / "model"
    shutil.copytree(TWO_DIGIT_ADDITION, directory, dirs_exist_ok=True)
    (directory / "chat_template.jinja").write_text(template)
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_jsonl(file, BadRows("fail"), key="k", render=ChatTemplate(directory).prompt)


@pytest.mark.parametrize("size", [20, 60, 700])
def test_no_template_moves_a_chat_to_the_other_side(tmp_path: Path, size: int) -> None:
    system = {"role": "system", "content": "add"}
    rows = [
        {"messages": [system, {"role": "user", "content": f"{n}+1"}], "answer": n + 1}
        for n in range(size)
    ]
    splits = [
        hold_out(read_chats(tmp_path, rows, template), 2, BadRows("fail")) for template in TEMPLATES
    ]
    texts = {split.train[0].text for split in splits}
    assert len(texts) == len(TEMPLATES), "do the templates differ?"
    for side in ("train", "held_out", "reserved"):
        first, *others = [[q.id for q in getattr(split, side)] for split in splits]
        assert first and all(ids == first for ids in others)


def with_call(name: str = "add", call_id: str = "c1", **changes: Any) -> list[dict[str, Any]]:
    call = {"id": call_id, "function": {"name": name, "arguments": '{"a": 2, "b": 1}'}}
    return [USER, ASSISTANT | {"tool_calls": [call]}, RESULT | {"tool_call_id": call_id} | changes]


FLAT_CALL = {"arguments": {"b": 1, "a": 2}, "name": "add", "unit": None}
SAME_CHATS = [
    ({"messages": [USER]}, {"messages": [USER | {"content": " 2+2\n", "name": None}]}),
    (
        {"messages": [{"role": "user", "content": "Add 1  and 2"}]},
        {"messages": [{"role": "user", "content": "add 1 and\t2"}], "tools": []},
    ),
    ({"messages": with_call()}, {"messages": with_call(call_id="call-9d2")}),
    (
        {"messages": with_call()},
        {"messages": [USER, ASSISTANT | {"tool_calls": [FLAT_CALL]}, RESULT]},
    ),
    ({"messages": [USER]}, {"messages": [USER, {"role": "assistant", "content": "4"}]}),
    ({"messages": [USER]}, {"messages": [USER], "response": "4"}),
]
OTHER_CHATS = [
    ({"messages": [USER]}, {"messages": [{"role": "system", "content": "add"}, USER]}),
    ({"messages": [USER]}, {"messages": [USER], "tools": [TOOL]}),
    ({"messages": [USER]}, {"messages": [USER | {"role": "tool"}]}),
    ({"messages": [USER]}, {"messages": [USER, USER]}),
    ({"messages": with_call()}, {"messages": with_call(name="subtract")}),
    ({"messages": with_call()}, {"messages": with_call(content="5")}),
    (
        {"messages": [{"role": "user", "content": "1 2"}]},
        {"messages": [{"role": "user", "content": "12"}]},
    ),
    ({"messages": [USER]}, {"prompt": "2+2"}),
]


@pytest.mark.parametrize(("first", "second"), SAME_CHATS)
def test_the_same_chat_has_one_identity(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    a, b = read_chats(tmp_path, [first | {"answer": 4}, second | {"answer": 4}])
    assert a.identity == b.identity


@pytest.mark.parametrize(("first", "second"), OTHER_CHATS)
def test_other_chats_have_other_identities(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    a, b = read_chats(tmp_path, [first | {"answer": 4}, second | {"answer": 4}], TOOLS_FIRST)
    assert a.identity != b.identity


def test_chats_for_which_the_template_writes_one_prompt_are_reported(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "system", "content": rule}, USER], "answer": answer}
        for rule, answer in (("add", 4), ("multiply", 4), ("say 5", 5))
    ]
    other = {"messages": [USER | {"content": "1+1"}], "answer": 2}
    bad_rows = BadRows("skip")
    split = keep_apart([], read_chats(tmp_path, [*rows, other], LAST), bad_rows)
    assert [q.text for q in split.held_out] == ["2+2=", "1+1="]
    assert (split.duplicates, bad_rows.count) == (1, 1)
    assert "line 2: repeats the prompt of " in bad_rows.messages[0]
    assert "another answer ('5')" in bad_rows.messages[1]
    split = keep_apart([], read_chats(tmp_path, [*rows, other], SHORT), BadRows("fail"))
    assert len(split.held_out) == 4
    with pytest.raises(PromptDataError, match=r"line 3: repeats the prompt of .*another answer"):
        keep_apart([], read_chats(tmp_path, [*rows, other], LAST), BadRows("fail"))


def test_a_row_with_the_text_of_a_chat_does_not_train_if_that_is_held_out(tmp_path: Path) -> None:
    chat, text = read_chats(
        tmp_path, [{"messages": [USER], "answer": 4}, {"prompt": "2+2 =", "answer": 4}], "2+2 ="
    )
    assert text.identity == "2+2 =" != chat.identity
    for train, held_out in (([text], [chat]), ([chat], [text])):
        assert keep_apart(train, held_out, BadRows("fail")).overlapping == 1
