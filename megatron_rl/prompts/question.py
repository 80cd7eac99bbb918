"""What every source of prompts yields before tokenization, and what happens to rows that cannot be used."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

_EXAMPLES_KEPT = 20


class PromptDataError(ValueError):
    """Prompt data that cannot be used; names the key, or the file and line, the rule and the remedy."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question in text.

    origin: where it came from, for messages (`train.jsonl line 3`). identity: questions of equal identity are the same
    question in disguise and never fall on both sides of the train/held-out split. target: a worked response, without
    the end-of-sequence token, where the source can write one.
    """

    id: str
    text: str
    answer: str
    task: str
    identity: str
    origin: str
    difficulty: str = ""
    target: str | None = None


class OnBadRow(enum.StrEnum):
    """Whether a bad row ends the run (fail) or is left out and counted (skip)."""

    FAIL = "fail"
    SKIP = "skip"


@dataclass
class BadRows:
    """Collects rows that cannot be used. count: how many. examples: the first of them, as `origin: reason`."""

    policy: OnBadRow
    count: int = 0
    examples: list[str] = field(default_factory=list)

    @classmethod
    def named(cls, policy: str) -> BadRows:
        """By the policy's name in the configuration. Raises `PromptDataError` for an unknown one."""
        if policy not in set(OnBadRow):
            raise PromptDataError(f"data.on_bad_row={policy}: must be {' or '.join(OnBadRow)}")
        return cls(OnBadRow(policy))

    def report(self, origin: str, reason: str) -> None:
        """Count a bad row, or raise `PromptDataError` when bad rows are fatal."""
        message = f"{origin}: {reason}"
        if self.policy is OnBadRow.FAIL:
            raise PromptDataError(f"{message}. Correct it, or leave such rows out with data.on_bad_row=skip")
        self.count += 1
        if len(self.examples) < _EXAMPLES_KEPT:
            self.examples.append(message)


def same_text(text: str) -> str:
    """The identity of a question known by its text alone: case and white space do not make it another question."""
    return " ".join(text.casefold().split())
