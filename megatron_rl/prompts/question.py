"""What every source of prompts yields before tokenization, and what happens to rows that cannot be
used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from megatron_rl.contracts.exit_codes import ExitCode, Failure

_EXAMPLES_KEPT = 20
_MOST_NAMED = 10_000
_LONGEST_REASON = 300  # characters: what a row holds may be megabytes


class PromptDataError(Failure, ValueError):
    """Prompt data that cannot be used; names the key, or the file and line, the rule and the
    remedy.
    """

    exit_code = ExitCode.BAD_DATA


@dataclass(frozen=True, slots=True)
class Question:
    """One question in text.

    id: unique within a run's data. task, difficulty: free labels that metrics group by. identity:
    questions of equal identity are the same question in disguise and never fall on both sides of
    the train/held-out split; "" stands for the text but for case and white space. origin: where it
    came from, for messages (`train.jsonl line 3`); "" stands for the id. worked: a worked response,
    without the end-of-sequence token, where the source can write one.
    """

    id: str
    text: str
    answer: str
    task: str
    difficulty: str = ""
    identity: str = ""
    origin: str = ""
    demonstration: str = ""

    def __post_init__(self) -> None:
        if not self.identity:
            object.__setattr__(self, "identity", " ".join(self.text.casefold().split()))
        if not self.origin:
            object.__setattr__(self, "origin", self.id)


class Source(Protocol):
    """Writes questions: an embedded task, a generator, or the user's own behind
    `data.source=package.module:Name`.
    """

    def questions(self, seed: int) -> Iterator[Question]:
        """A stream that depends on the seed alone, endless or not. Equal texts are used once."""
        ...


@dataclass
class BadRows:
    """Collects rows that are not used. policy: whether a bad row ends the run or is left out and
    counted.

    count: how many bad ones. examples: the first of them, as `origin: reason`. named: the first
    10,000 of all rows that are left out, repeated ones too.
    """

    policy: Literal["fail", "skip"]
    count: int = 0
    examples: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)

    def report(self, origin: str, reason: str) -> None:
        """Count a bad row, or raise `PromptDataError` when bad rows are fatal."""
        message = _shortened(f"{origin}: {reason}")
        if self.policy == "fail":
            raise PromptDataError(
                f"{message}. Correct it, or leave such rows out with data.on_bad_row=skip"
            )
        self.count += 1
        if len(self.examples) < _EXAMPLES_KEPT:
            self.examples.append(message)
        self._name(message)

    def leave_out(self, origin: str, reason: str) -> None:
        """Name a row that is not used though nothing is wrong with it."""
        self._name(_shortened(f"{origin}: {reason}"))

    def _name(self, message: str) -> None:
        if len(self.named) < _MOST_NAMED:
            self.named.append(message)


def _shortened(text: str) -> str:
    """One line of bounded length."""
    text = text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}…"
    return " ".join(text.split())
