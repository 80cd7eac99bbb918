"""Messages as the text a chat model reads, by the template that its tokenizer brings along."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_rl.models.tokenizer import TokenizerError


class ChatTemplate:
    """A checkpoint's `chat_template`, rendered as transformers does it, in Jinja's sandbox.

    Looked for in chat_template.jinja and tokenizer_config.json when it is first needed: raises
    `TokenizerError` then.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._template: jinja2.Template | None = None
        self._names: dict[str, str] = {}

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text up to where the assistant's next message begins.

        Raises ValueError when the template refuses.
        """
        if self._template is None:
            self._open()
            assert self._template is not None
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._names
            )
        except Exception as error:  # a template can divide by zero as any program can
            raise ValueError(f"the chat template refuses its messages ({error})") from error

    def _open(self) -> None:
        file, config = (
            self._directory / "chat_template.jinja",
            self._directory / "tokenizer_config.json",
        )
        try:
            settings = json.loads(config.read_bytes()) if config.is_file() else {}
            source = (
                file.read_text(encoding="utf-8")
                if file.is_file()
                else settings.get("chat_template")
            )
            if not isinstance(source, str):
                raise TokenizerError(
                    f"{self._directory} holds no chat template, and there are rows with `messages`. Give `prompt` "
                    "instead, or take the tokenizer of a chat model"
                )
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            environment.globals["raise_exception"] = _refuse
            self._template = environment.from_string(source)
        except (OSError, ValueError, RecursionError, jinja2.TemplateError) as error:
            if isinstance(error, TokenizerError):
                raise
            raise TokenizerError(
                f"the chat template of {self._directory} cannot be read: {error}"
            ) from error
        self._names = {name: _content(settings.get(name)) for name in ("bos_token", "eos_token")}


def _refuse(message: str) -> NoReturn:
    """What templates call to say that they cannot show such messages."""
    raise jinja2.TemplateError(message)


def _content(token: Any) -> str:
    """A special token's text, which tokenizer_config.json holds as it is or in an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""
