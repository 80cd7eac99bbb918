"""Messages that environments add, and chat templates that change earlier messages."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import tokenizers

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.plugins import PluginError
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.environments.chat_turns import ChatTurns
from megatron_rl.environments.environment import SingleTurn, open_chat_turns
from megatron_rl.environments.episode import Episode
from megatron_rl.environments.rollout_builder import RolloutRejected
from megatron_rl.models.chat_template import ChatTemplate
from megatron_rl.models.tokenizer import Tokenizer
from tests.support.failures import fails
from tests.support.policies import TWO_DIGIT_ADDITION
from tests.support.scripted_model import (
    CHECKPOINT,
    EOS,
    PROMPT,
    TOKENIZER,
    ScriptedModel,
    Turn,
    open_episode,
)

# A newline after each message, as in ChatML; the tokenizer has a space for it
APPENDS = (
    "{% for m in messages %}{{ m.role }}={{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    "{{ eos_token }} {% endfor %}{% if add_generation_prompt %}assistant={% endif %}"
)
# As Qwen3's: reasoning is dropped from messages before the last one of the user
DROPS_REASONING = APPENDS.replace(
    "{{ m.content }}",
    "{% if '</think>' in m.content and loop.index0 < messages | map(attribute='role') | list | "
    "length - 1 and messages[-1].role == 'user' %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}",
)
# As Qwen3's: the last message of the assistant begins with an empty thought
EMPTY_THOUGHT = APPENDS.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}",
)
# As some others: the date or the number of messages is in the first line
COUNTS = "{{ messages | length }} messages " + APPENDS
# Reasoning is rendered in the last message alone
LAST_REASONING = APPENDS.replace(
    "{{ m.content }}",
    "{% if loop.last and m.reasoning_content %}{{ m.reasoning_content }}{% endif %}{{ m.content }}",
)
# The role of tools is unknown
DROPS_TOOLS = APPENDS.replace("{{ m.role }}", "{% if m.role != 'tool' %}{{ m.role }}").replace(
    " {% endfor %}{% if", " {% endif %}{% endfor %}{% if"
)
NO_TOOLS = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
NO_TOOLS += "{% endif %}{% endfor %}" + APPENDS
NO_CALLS = "{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no calls') }}"
NO_CALLS += "{% endif %}{% endfor %}" + APPENDS


def write(folder: Path, template: str) -> Path:
    directory = shutil.copytree(TWO_DIGIT_ADDITION, folder / "model")
    (directory / "chat_template.jinja").write_text(template)
    return directory


def open_turns(folder: Path, template: str, *roles: str) -> ChatTurns:
    return ChatTurns(ChatTemplate(write(folder, template)), TOKENIZER, roles)


def test_messages_follow_the_end_of_a_response(tmp_path: Path) -> None:
    turns = open_turns(tmp_path, APPENDS, "tool", "user")
    tokens = turns.tokens_from_end([{"role": "tool", "content": "42"}])
    assert tokens == TOKENIZER.encode("<eos> tool=42<eos> assistant=")
    messages = [{"role": "tool", "content": "1"}, {"role": "user", "content": "more"}]
    expectation = TOKENIZER.encode("<eos> tool=1<eos> user=more<eos> assistant=")
    assert turns.tokens_from_end(messages) == expectation
    with pytest.raises(ValueError, match="'system' is not one of the environment's chat_roles"):
        turns.tokens_from_end([{"role": "system", "content": "x"}])


def test_an_episode_is_what_the_template_renders(tmp_path: Path) -> None:
    """The tokens of two turns equal the tokens of the whole chat, with the sampled ones in it."""
    turns = open_turns(tmp_path, APPENDS, "tool")
    model = ScriptedModel([Turn.saying("12"), Turn.saying("34")])
    episode = open_episode(model, chat_turns=turns)

    async def play(episode: Episode) -> None:
        await episode.respond()
        episode.observe_messages([{"role": "tool", "content": "7"}])
        await episode.respond()

    asyncio.run(play(episode))
    tokens = [token for segment in episode.rollout().segments for token in segment.tokens.tolist()]
    expectation = "12<eos> tool=7<eos> assistant=34<eos>"
    assert tokens == [*PROMPT.token_ids, *TOKENIZER.encode(expectation)]


def test_an_environment_without_roles_adds_no_messages() -> None:
    episode = open_episode(ScriptedModel([]))
    with pytest.raises(ValueError, match="chat_roles = "):
        episode.observe_messages([{"role": "tool", "content": "7"}])


@pytest.mark.parametrize(
    ("template", "role", "words"),
    [
        (DROPS_REASONING, "user", r"user → assistant → user.*'<think>.*becomes"),
        (EMPTY_THOUGHT, "tool", r"user → assistant → tool.*'<think>.*becomes 'probe answer"),
        (COUNTS, "user", r"From character 0 on, '1 messages.*becomes '2 messages"),
        (LAST_REASONING, "tool", r"'thoughtprobe.*becomes 'answer"),
        (NO_TOOLS, "tool", r"cannot render.*user, assistant, tool.*no tools"),
        (NO_CALLS, "tool", r"cannot render.*no calls"),
    ],
)
def test_templates_that_cannot_append_are_refused(
    tmp_path: Path, template: str, role: str, words: str
) -> None:
    with fails(ExitCode.REFUSED, match=rf"chat_template\.jinja: .*{words}") as error:
        open_turns(tmp_path, template, role)
    assert error.value.exit_code is ExitCode.REFUSED


@pytest.mark.parametrize(
    ("template", "role"), [(DROPS_REASONING, "tool"), (NO_TOOLS, "user"), (NO_CALLS, "user")]
)
def test_templates_are_refused_only_for_the_roles_in_use(
    tmp_path: Path, template: str, role: str
) -> None:
    open_turns(tmp_path, template, role)


def test_the_template_in_the_tokenizer_settings_is_named(tmp_path: Path) -> None:
    directory = write(tmp_path, "")
    (directory / "chat_template.jinja").unlink()
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": COUNTS}))
    with fails(ExitCode.REFUSED, match=r"tokenizer_config\.json: the chat template"):
        ChatTurns(ChatTemplate(directory), TOKENIZER, ["user"])


def test_only_environments_with_roles_need_a_template(tmp_path: Path) -> None:
    class Chats(SingleTurn):
        chat_roles: object = ("user",)

    directory = write(tmp_path, COUNTS)
    assert open_chat_turns(SingleTurn(), directory, TOKENIZER) is None
    with fails(ExitCode.REFUSED):
        open_chat_turns(Chats(), directory, TOKENIZER)
    Chats.chat_roles = "tool"
    with pytest.raises(PluginError, match="must be a tuple of roles"):
        open_chat_turns(Chats(), directory, Tokenizer.from_directory(directory))


def play(folder: Path, template: str, *actions: object, ends: int = EOS) -> list[int]:
    """Return the tokens after the prompt.

    actions: a number of sampled responses, a text to observe, or messages to add, in order.
    """
    model = ScriptedModel([Turn((*TOKENIZER.encode("12"), ends), (("3", 3),))] * 3)
    backend = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    tokenizer = Tokenizer(backend, (EOS, 0))
    turns = ChatTurns(ChatTemplate(write(folder, template)), tokenizer, ["tool"])
    episode = open_episode(model, chat_turns=turns, tokenizer=tokenizer, budget=200)

    async def run() -> None:
        for action in actions:
            if isinstance(action, str):
                episode.observe(action)
            elif isinstance(action, list):
                episode.observe_messages([{"role": "tool", "content": text} for text in action])
            else:
                await episode.respond()

    asyncio.run(run())
    tokens = [token for segment in episode.rollout().segments for token in segment.tokens.tolist()]
    return tokens[len(PROMPT.token_ids) :]


# As Qwen3's: results that follow each other are one turn
ONE_TURN = APPENDS.replace(
    "{{ eos_token }} {% endfor %}",
    "{% if not (m.role == 'tool' and not loop.last and loop.nextitem.role == 'tool') %}"
    "{{ eos_token }} {% endif %}{% endfor %}",
)
SPACE_BEFORE_END = APPENDS.replace("{{ eos_token }}", " {{ eos_token }}")
NEXT = "assistant=12<eos>"


@pytest.mark.parametrize(
    ("template", "actions", "text"),
    [
        (APPENDS, (1, ["4"], 1), f"12<eos> tool=4<eos> {NEXT}"),
        (APPENDS, (1, ["4"], ["5"], 1), f"12<eos> tool=4<eos> tool=5<eos> {NEXT}"),
        (
            APPENDS,
            (1, ["4"], ["5"], ["6"], 1),
            f"12<eos> tool=4<eos> tool=5<eos> tool=6<eos> {NEXT}",
        ),
        (APPENDS, (1, ["4"], [], ["5"], 1), f"12<eos> tool=4<eos> tool=5<eos> {NEXT}"),
        (APPENDS, (1, ["4", "5"], 1), f"12<eos> tool=4<eos> tool=5<eos> {NEXT}"),
        (ONE_TURN, (1, ["4"], ["5"], 1), f"12<eos> tool=4tool=5<eos> {NEXT}"),
        (APPENDS, (1, ["4"], 1, ["5"], 1), f"12<eos> tool=4<eos> {NEXT} tool=5<eos> {NEXT}"),
        (APPENDS, (1, ["4"], "x", 1), "12<eos> tool=4<eos> assistant=x12<eos>"),
        (APPENDS, (1, [], 1), "12<eos>12<eos>"),
        (SPACE_BEFORE_END, (1, ["4"], 1), f"12<eos> tool=4 <eos> {NEXT}"),
        (APPENDS, (1, ["4"]), "12<eos>"),
    ],
)
def test_every_order_of_calls_gives_the_templates_text(
    tmp_path: Path, template: str, actions: tuple[object, ...], text: str
) -> None:
    assert play(tmp_path, template, *actions) == list(TOKENIZER.encode(text))


@pytest.mark.parametrize(
    "actions", [(["4"], 1), ("x", ["4"], 1), (1, "x", ["4"]), (1, ["4"], "x", ["5"])]
)
def test_messages_that_follow_no_response_are_refused(
    tmp_path: Path, actions: tuple[object, ...]
) -> None:
    with pytest.raises(ValueError, match="must follow a response"):
        play(tmp_path, APPENDS, *actions)


def test_another_end_than_that_of_the_template_rejects_the_rollout(tmp_path: Path) -> None:
    with pytest.raises(RolloutRejected, match=r"ended with '<pad>', but .* '<eos>'") as error:
        play(tmp_path, APPENDS, 1, ["4"], ends=0)
    assert error.value.reason == "other_end"


def test_nothing_is_added_after_a_response_that_was_cut_off(tmp_path: Path) -> None:
    turns = open_turns(tmp_path, APPENDS, "tool")
    cut = Turn(TOKENIZER.encode("12"), (("3", 2),), FinishReason.LENGTH)
    episode = open_episode(ScriptedModel([cut]), chat_turns=turns)
    asyncio.run(episode.respond())
    episode.observe_messages([{"role": "tool", "content": "4"}])
    assert asyncio.run(episode.respond()).finish_reason is FinishReason.LENGTH
    assert episode.rollout().segments[-1].tokens.tolist() == list(TOKENIZER.encode("12"))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (DROPS_TOOLS, r"ignores messages of the role 'tool'"),
        (APPENDS.replace("{{ m.content }}", "{{ m.content | length }}"), "ignores.*'assistant'"),
        (APPENDS.replace("{{ eos_token }}", "<pad>"), "no end-of-sequence token.*'<pad> tool="),
        (APPENDS.replace("{{ eos_token }}", "ok{{ eos_token }}"), "'ok' after a response"),
    ],
)
def test_templates_without_an_end_or_a_role_are_refused(
    tmp_path: Path, template: str, words: str
) -> None:
    with fails(ExitCode.REFUSED, match=words):
        open_turns(tmp_path, template, "tool")
