"""Messages become what transformers would make of them, and a template cannot do more than that."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_rl.models.chat_template import ChatTemplate
from megatron_rl.models.tokenizer import TokenizerError
from tests.support.policies import TWO_DIGIT_ADDITION

CHATML = """{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- raise_exception('no tools') }}
    {%- endif %}
    {{- bos_token + message.role + '\\n' + message['content'] | trim + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'assistant\\n' }}
{%- endif %}
"""
MESSAGES = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": " 2+2 "},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3"},
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return shutil.copytree(TWO_DIGIT_ADDITION, tmp_path / "model")


def write(directory: Path, template: str, **settings: object) -> ChatTemplate:
    config = directory / "tokenizer_config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"chat_template": template} | settings)
    )
    return ChatTemplate(directory)


def test_messages_read_as_transformers_writes_them(directory: Path) -> None:
    template = write(directory, CHATML, bos_token={"content": "<", "__type": "AddedToken"})
    expected = AutoTokenizer.from_pretrained(directory).apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    text = template.prompt(MESSAGES)
    assert (
        text == expected
        and text.startswith("<system\nAdd.")
        and text.endswith("<user\n3+3<eos>\nassistant\n")
    )


def test_a_file_of_its_own_goes_first(directory: Path) -> None:
    template = write(directory, "from the settings")
    (directory / "chat_template.jinja").write_text("{{ messages | length }} messages")
    assert template.prompt(MESSAGES) == "4 messages"


def test_messages_that_a_template_refuses_are_bad_rows(directory: Path) -> None:
    with pytest.raises(ValueError, match=r"refuses its messages \(no tools\)") as refused:
        write(directory, CHATML).prompt([{"role": "tool", "content": ""}])
    assert not isinstance(refused.value, TokenizerError)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ open('x') }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_reaches_nothing_of_the_interpreter(directory: Path, template: str) -> None:
    with pytest.raises(ValueError, match="refuses its messages"):
        write(directory, template).prompt(MESSAGES)


@pytest.mark.parametrize(
    ("template", "message"),
    [("{% if %}", "cannot be read"), (None, "holds no chat template"), (5, "no chat template")],
)
def test_tokenizers_without_a_usable_template_are_named(
    directory: Path, template: str, message: str
) -> None:
    with pytest.raises(TokenizerError, match=message):
        write(directory, template).prompt(MESSAGES)
