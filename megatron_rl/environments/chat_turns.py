"""Messages that an environment adds to a chat after a response, as the chat template writes them.

Tokens are never taken back: the text of new messages follows the tokens that the model sampled.
This is what the template itself would render only if it never changes the text of earlier messages.
Some templates do: they drop reasoning from earlier messages, or end the last message differently.
Such a template is refused before the run starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.models.chat_template import ChatTemplate
from megatron_rl.models.tokenizer import Tokenizer

ChatMessage = Mapping[str, Any]

_QUESTION = {"role": "user", "content": "probe question"}
_ANSWER_TEXT = "probe answer"
_ADDITION_TEXT = "probe addition"
_ANSWER = {"role": "assistant", "content": _ANSWER_TEXT}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "probe", "arguments": {"a": 1}}}],
}
# Both ways in which chats hold reasoning
_REASONING = (
    {"role": "assistant", "content": f"<think>\nprobe thought\n</think>\n\n{_ANSWER_TEXT}"},
    {"role": "assistant", "content": _ANSWER_TEXT, "reasoning_content": "probe thought"},
)
_EXCERPT = 24  # characters
_MAX_TOKENS_BEFORE_END = 64  # that a template writes between a response and its end


class ChatTurns:
    """Renders the messages that follow a response.

    roles: of the messages.

    Raises `Failure` if the template refuses these roles or ignores their messages, if
    it writes no end-of-sequence token after a response, or renders earlier messages differently
    once others follow them.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, roles: Sequence[str]) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._roles = tuple(roles)
        for conversation in _probes(self._roles):
            self._check_appends(conversation)
        for role in self._roles:
            self._check_addition({"role": role, "content": _ADDITION_TEXT})

    def tokens_from_end(
        self, messages: Sequence[ChatMessage], *, at_most: int | None = None
    ) -> tuple[int, ...]:
        """Return the tokens from the end of a response to the beginning of the next one.

        The first one is the end-of-sequence token, which the model has sampled.

        at_most: of a text with more tokens, the first ones are enough, but more than `at_most`.

        Raises ValueError for roles that the environment has not named, and `UnknownText`.
        """
        for message in messages:
            if message.get("role") not in self._roles:
                raise ValueError(
                    f"the role {message.get('role')!r} is not one of the environment's chat_roles "
                    f"{self._roles}. Add it there, so that the chat template is checked for it"
                )
        return self._split_at_end(self._text_after_answer(messages), at_most)[1]

    def _text_after_answer(self, messages: Sequence[ChatMessage]) -> str:
        text = self._render([_QUESTION, _ANSWER, *messages])
        _, answer, text_after = text.partition(_ANSWER_TEXT)
        if not answer:
            raise self._left_out("assistant")
        return text_after

    def _left_out(self, role: str) -> Failure:
        return Failure(
            f"{self._template.file}: the chat template ignores messages of the role {role!r}. "
            "Use a template that renders them, or add text with episode.observe",
            ExitCode.REFUSED,
        )

    def _split_at_end(self, text: str, at_most: int | None = None) -> tuple[str, tuple[int, ...]]:
        """Return the text before the first end-of-sequence token, and the tokens from there on."""
        limit = None if at_most is None else at_most + _MAX_TOKENS_BEFORE_END
        ids = self._tokenizer.encode(text, at_most=limit)
        eos_ids = self._tokenizer.eos_ids
        end = next((n for n, token in enumerate(ids) if token in eos_ids), None)
        if end is None:
            raise Failure(
                f"{self._template.file}: the chat template writes no end-of-sequence token after a "
                f"response, but {text[:_EXCERPT]!r}. If a token there ends responses, name it in "
                "generation_config.json (eos_token_id)",
                ExitCode.REFUSED,
            )
        return self._tokenizer.decode(ids[:end]), ids[end:]

    def _check_addition(self, message: ChatMessage) -> None:
        """Raise `Failure` unless a message follows the end of a response."""
        text = self._text_after_answer([message])
        before_end, _ = self._split_at_end(text)
        if before_end.strip():
            raise Failure(
                f"{self._template.file}: the chat template writes {before_end[:_EXCERPT]!r} after "
                "a response, before its end-of-sequence token. Use a template that does not",
                ExitCode.REFUSED,
            )
        if _ADDITION_TEXT not in text:
            raise self._left_out(message["role"])

    def _check_appends(self, conversation: Sequence[ChatMessage]) -> None:
        """Raise `Failure` unless each message only adds text."""
        for length in range(1, len(conversation)):
            messages = conversation[: length + 1]
            longer = self._render(messages, add_generation_prompt=False)
            is_answered = messages[-1]["role"] == "assistant"
            shorter = self._render(messages[:-1], add_generation_prompt=is_answered)
            if not longer.startswith(shorter):
                raise self._difference(shorter, longer, messages)

    def _render(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True
    ) -> str:
        try:
            return self._template.render(messages, add_generation_prompt=add_generation_prompt)
        except ValueError as error:
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise Failure(
                f"{self._template.file}: the chat template cannot render messages of the roles "
                f"{roles} ({error}). Use a template for these roles, or add text with "
                "episode.observe",
                ExitCode.REFUSED,
            ) from error

    def _difference(self, shorter: str, longer: str, messages: Sequence[ChatMessage]) -> Failure:
        pairs = zip(shorter, longer, strict=False)
        position = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        roles = " → ".join(message["role"] for message in messages)
        window = slice(position, position + _EXCERPT)
        return Failure(
            f"{self._template.file}: the chat template changes the text of earlier messages when "
            f"another one follows ({roles}). From character {position} on, {shorter[window]!r} "
            f"becomes {longer[window]!r}. The environment adds messages to tokens that stay as "
            "they are, so the model would train on other text than the template renders. Use a "
            "template that only appends, such as one that keeps the reasoning of earlier messages, "
            "or add text with episode.observe",
            ExitCode.REFUSED,
        )


def _probes(roles: Sequence[str]) -> Iterator[list[ChatMessage]]:
    """Yield conversations with each role, with reasoning, and with tool calls."""
    for role in roles:
        addition = {"role": role, "content": _ADDITION_TEXT}
        yield [_QUESTION, _ANSWER, addition, _ANSWER, addition, _ANSWER]
        for answer in _REASONING:
            yield [_QUESTION, answer, addition, answer, addition]
        if role == "tool":
            yield [_QUESTION, _CALL, addition, _CALL, addition, _ANSWER]
