"""Chat templates render the same prompts as transformers, and cannot run code."""

import json
import shutil
import subprocess
import sys
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
LAST_USER_MESSAGE = """{%- set last = namespace(index=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set last.index = loop.index0 %}
    {%- endif %}
{%- endfor %}
{{- messages[last.index].content }}
"""
MESSAGES = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": " 2+2 <b> & 'é' "},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3"},
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return shutil.copytree(TWO_DIGIT_ADDITION, tmp_path / "model")


def write(directory: Path, template: object, **settings: object) -> ChatTemplate:
    """Write a template and special tokens into tokenizer_config.json."""
    config = directory / "tokenizer_config.json"
    contents = json.loads(config.read_text()) | {"chat_template": template} | settings
    config.write_text(json.dumps(contents))
    return ChatTemplate(directory)


def render_with_transformers(directory: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text


def test_messages_are_rendered_as_in_transformers(directory: Path) -> None:
    template = write(directory, CHATML, bos_token={"content": "<", "__type": "AddedToken"})
    text = template.prompt(MESSAGES)
    assert text == render_with_transformers(directory)
    assert text.startswith("<system\nAdd.")
    assert text.endswith("<user\n3+3<eos>\nassistant\n")


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{{ messages[1] | tojson }}", '{"role": "user", "content": " 2+2 <b> & \'é\' "}'),
        ("{{ messages[0] | tojson(indent=2, sort_keys=True) }}", '  "content": "Add.",\n'),
        ("{{ pad_token }}{{ eos_token }}{{ unk_token }}", "<pad><eos><unk>"),
        ("{{ bos_token is defined }}", "False"),
        ("{{ image_token }}", "<image>"),
        ("{{ strftime_now('%Y') | length }} digits", "4 digits"),
        ("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", "Add."),
        (
            "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}"
            "{{ m.content }};{% endfor %}",
            "Add.;4;",
        ),
        ("{% generation %}{{ messages[2].content }}{% endgeneration %}", "4"),
        (LAST_USER_MESSAGE, "3+3"),
        ("{{ tools is none }} {{ documents is none }}", "True True"),
    ],
    ids=[
        "tojson",
        "tojson_options",
        "special_tokens",
        "missing_token",
        "model_specific_token",
        "strftime_now",
        "break",
        "continue",
        "generation",
        "namespace",
        "no_tools",
    ],
)
def test_template_features_of_transformers(directory: Path, template: str, part: str) -> None:
    text = write(directory, template, image_token="<image>").prompt(MESSAGES)
    assert text == render_with_transformers(directory)
    assert part in text


def test_template_file_takes_precedence(directory: Path) -> None:
    template = write(directory, "from the settings")
    (directory / "chat_template.jinja").write_text("{{ messages | length }} messages")
    assert template.prompt(MESSAGES) == render_with_transformers(directory) == "4 messages"


def test_default_of_several_templates(directory: Path) -> None:
    templates = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ messages | length }} messages"},
    ]
    text = write(directory, templates).prompt(MESSAGES)
    assert text == render_with_transformers(directory) == "4 messages"


def test_messages_that_a_template_refuses_are_bad_rows(directory: Path) -> None:
    with pytest.raises(ValueError, match=r"no tools") as error:
        write(directory, CHATML, bos_token="<").prompt([{"role": "tool", "content": ""}])
    assert not isinstance(error.value, TokenizerError)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ open('x') }}",
        "{{ 1 / 0 }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ cycler.__init__.__globals__.os.system('touch hacked') }}",
        "{{ raise_exception.__globals__['jinja2'] }}",
        "{{ ''.__class__.__base__.__subclasses__()[0] }}",
        "{{ '{0.__class__.__mro__[1].__subclasses__}'.format(messages)() }}",
        "{{ (messages | map(attribute='__class__') | first).__mro__ }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_template_cannot_run_code(
    directory: Path, template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="chat template"):
        write(directory, template).prompt(MESSAGES)
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "cannot be read"),
        ("{{ messages | no_such_filter }}", "cannot be read"),
        (None, "no chat template"),
        (5, "no chat template"),
        ([{"name": "tool_use", "template": "tools"}], "no chat template"),
    ],
)
def test_unusable_templates_are_refused(directory: Path, template: object, message: str) -> None:
    with pytest.raises(TokenizerError, match=rf"{directory}.*{message}"):
        write(directory, template).prompt(MESSAGES)


def test_unreadable_tokenizer_settings_are_refused(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=rf"{directory}.*cannot be read"):
        ChatTemplate(directory).prompt(MESSAGES)


@pytest.mark.slow
def test_transformers_is_imported_only_for_messages(directory: Path) -> None:
    write(directory, CHATML, bos_token="<")
    program = (
        "import sys; from pathlib import Path\n"
        "from megatron_rl.models.chat_template import ChatTemplate\n"
        f"template = ChatTemplate(Path({str(directory)!r}))\n"
        "assert 'transformers' not in sys.modules\n"
        "template.prompt([{'role': 'user', 'content': '1+1'}])\n"
        "assert 'transformers' in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
