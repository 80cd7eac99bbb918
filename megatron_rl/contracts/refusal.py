"""A refused setting, and how it is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_rl.contracts.exit_codes import ExitCode, Failure


class Refusal(NamedTuple):
    """One setting that cannot be. remedy may be empty when the rule's text already holds it."""

    key: str
    value: Any
    rule: str
    remedy: str = ""

    def __str__(self) -> str:
        texts = [
            text if text.endswith((".", "!", "?")) else f"{text}."
            for text in (self.rule, self.remedy)
            if text
        ]
        return f"{self.key}={shown(self.value)}: {' '.join(texts)}"


class ConfigurationRefused(Failure):
    """A configuration that must not run.

    refusals: never empty, in the order of the configuration's sections.
    """

    exit_code = ExitCode.REFUSED

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        count = (
            "1 setting is refused"
            if len(refusals) == 1
            else f"{len(refusals)} settings are refused"
        )
        super().__init__("\n".join([*map(str, refusals), f"{count}; nothing was started."]))
        self.refusals = tuple(refusals)


def shown(value: Any) -> str:
    """A value as one writes it on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value) or "''"
