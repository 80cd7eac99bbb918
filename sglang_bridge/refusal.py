"""A setting that cannot be used, and how its error reads."""

from __future__ import annotations

from typing import Any, NamedTuple


class Refusal(NamedTuple):
    """One setting that cannot be used.

    key: the setting's full name. value: its value. rule: why the value cannot be used. remedy: what
    to do instead; it may be empty when the rule already says it.
    """

    key: str
    value: Any
    rule: str
    remedy: str = ""

    def __str__(self) -> str:
        sentences = [
            text if text.endswith((".", "!", "?")) else f"{text}."
            for text in (self.rule, self.remedy)
            if text
        ]
        return f"{self.key}={format_value(self.value)}: {' '.join(sentences)}"


def format_value(value: Any) -> str:
    """A value as one writes it on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value) or "''"
