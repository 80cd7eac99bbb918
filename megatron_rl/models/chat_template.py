"""Renders messages as a prompt with the chat template of a checkpoint's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from megatron_rl.models.tokenizer import Tokenizer, TokenizerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ChatTemplate:
    """Chat template in `directory`, rendered by transformers in Jinja's immutable sandbox.

    The names of control tokens in messages and tools are text: `Tokenizer.encode` tells them from
    those that the template writes.

    The template is read when the first messages are rendered, because importing transformers takes
    seconds and most data sets have no messages.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tokenizer: PreTrainedTokenizerFast | None = None
        self._quote: Callable[[str], str] = str
        self._renders_tools = False

    @property
    def file(self) -> Path:
        """The file with the template."""
        file = self._directory / "chat_template.jinja"
        return file if file.is_file() else self._directory / "tokenizer_config.json"

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of messages, by default up to where the assistant's next one begins.

        tools: JSON schemas of the functions that the model may call.

        Raises ValueError if the template refuses these messages or ignores the tools, and
        `TokenizerError` if the template is missing or invalid.
        """
        text = self.render(messages, tools, add_generation_prompt=add_generation_prompt)
        if tools and not self._renders_tools:
            if text == self.render(messages, add_generation_prompt=add_generation_prompt):
                raise ValueError(
                    f"the chat template ignores `tools` ({self.file}). Describe them in a message, "
                    "or use a template that renders tools"
                )
            self._renders_tools = True
        return text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of messages, by default up to where the assistant's next one begins.

        Raises as `prompt` does, but renders without tools if the template ignores them.
        """
        if self._tokenizer is None:
            self._tokenizer = _load_tokenizer(self._directory)
            self._quote = Tokenizer.from_directory(self._directory).quote
        try:
            text = self._tokenizer.apply_chat_template(
                _quote_all([dict(message) for message in messages], self._quote),
                tools=_quote_all([dict(tool) for tool in tools], self._quote) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except jinja2.TemplateSyntaxError as error:
            raise _unreadable(self._directory, error) from error
        except Exception as error:  # a template can fail like any program
            raise ValueError(f"the chat template refuses its messages ({error})") from error
        assert isinstance(text, str)
        return text


def _quote_all(value: Any, quote: Callable[[str], str]) -> Any:
    """Return lists and objects with all of their texts quoted."""
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, Mapping):
        return {_quote_all(key, quote): _quote_all(inner, quote) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_quote_all(inner, quote) for inner in value]
    return value


def _load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer's files as transformers does, and check that it has a chat template."""
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # transformers raises many kinds of errors for broken files
        raise _unreadable(directory, error) from error
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        template = None
    if not isinstance(template, str):
        raise TokenizerError(
            f"{directory} holds no chat template, but the data has rows with `messages`. "
            "Give `prompt` instead of `messages`, or use the tokenizer of a chat model"
        )
    return tokenizer


def _unreadable(directory: Path, error: Exception) -> TokenizerError:
    return TokenizerError(
        f"the chat template of {directory} cannot be read: {error}. Correct "
        "chat_template.jinja or tokenizer_config.json, or take the published files"
    )
