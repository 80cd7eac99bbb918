"""A refused setting, and how it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """One setting that cannot be. remedy may be empty when the rule's text already holds it."""

    key: str
    value: Any
    rule: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.key}={_shown(self.value)}: {_sentence(self.rule)}"
        return f"{text} {_sentence(self.remedy)}" if self.remedy else text

    @classmethod
    def from_error(cls, key: str, value: Any, error: Exception) -> Refusal:
        """Take over another module's message, which names rule and remedy itself."""
        text = str(error)
        head, separator, rest = text.partition(": ")
        return cls(key, value, rest if separator and head.startswith(key) else text)


class ConfigurationRefused(Exception):
    """A configuration that must not run. refusals: never empty, in the order of the configuration's sections."""

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        super().__init__("\n".join(str(refusal) for refusal in refusals))
        self.refusals = tuple(refusals)

    def report(self) -> str:
        """The text for a terminal: a headline, then a line for each refusal."""
        count = len(self.refusals)
        headline = "1 setting is refused" if count == 1 else f"{count} settings are refused"
        return "\n".join([f"{headline}; nothing was started.", *(f"  {refusal}" for refusal in self.refusals)])


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value or "''"
    return str(value)


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
