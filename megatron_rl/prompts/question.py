"""Sources of questions, and the collection of rows that cannot be used."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.prompt import Question, ReadAnswer, answer_as_written

MAX_CHARACTERS = 65_536  # of an id, a reference answer or details
_MAX_EXAMPLES = 20
_MAX_REASONS = 3  # that a message about a whole file names
_MAX_MESSAGES = 10_000
_MAX_MESSAGE_CHARACTERS = 300  # a row may have megabytes


class PromptDataError(Failure, ValueError):
    """Prompt data cannot be used.

    The message names the key, or the file and line, the rule and the remedy.
    """

    exit_code = ExitCode.BAD_DATA


class Source(Protocol):
    """Generates questions.

    A source is an embedded task, a generator of reasoning-gym, or a user-defined class behind
    `data.source=package.module:Name`.
    """

    @abstractmethod
    def questions(self, seed: int) -> Iterator[Question]:
        """Yield questions that depend on the seed alone, endlessly or not.

        Questions with equal texts are used once.
        """
        ...


@dataclass
class BadRows:
    """Collects rows that are not used.

    policy: `fail` ends the run at the first bad row, `skip` leaves bad rows out and counts them.
    read_answer: rows that repeat a question with the same answer are not bad.
    count: number of bad rows.
    examples: the first bad rows, as `origin: reason`.
    messages: the first 10,000 rows that are not used, also repeated ones, as `origin: reason`.
    """

    policy: Literal["fail", "skip"]
    read_answer: ReadAnswer = answer_as_written
    count: int = 0
    examples: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def report(self, origin: str, reason: str) -> None:
        """Count a bad row. Raises `PromptDataError` if the policy is `fail`."""
        message = shorten(f"{origin}: {reason}")
        if self.policy == "fail":
            raise PromptDataError(
                f"{message}. Correct the row, or leave such rows out with data.on_bad_row=skip"
            )
        self.count += 1
        if len(self.examples) < _MAX_EXAMPLES:
            self.examples.append(message)
        self._add_message(message)

    def is_same_answer(self, question: Question, other: Question) -> bool:
        """Return whether the scorer takes the answers of two questions for the same.

        An answer that it cannot read, or that is too long to be used, is the same only as an equal
        text.
        """
        is_equal = answer_as_written(question) == answer_as_written(other)
        if is_equal or max(len(question.answer), len(other.answer)) > MAX_CHARACTERS:
            return is_equal
        try:
            return self.read_answer(question) == self.read_answer(other)
        except ValueError:
            return False

    def leave_out(self, origin: str, reason: str) -> None:
        """Record a row that is valid but not used."""
        self._add_message(shorten(f"{origin}: {reason}"))

    def _add_message(self, message: str) -> None:
        if len(self.messages) < _MAX_MESSAGES:
            self.messages.append(message)


@dataclass
class CheckedRows:
    """Counts the rows that a check refuses, and reports them to `bad_rows`.

    Under `data.on_bad_row=fail`, a bad row before the first usable one is reported together with
    that one. If no row is usable, leaving bad rows out is no remedy, and the caller says so.

    num_bad: number of bad rows.
    """

    bad_rows: BadRows
    num_bad: int = 0
    _has_usable: bool = field(default=False, init=False)
    _first_bad: tuple[str, str] | None = field(default=None, init=False)
    _origin_by_reason: dict[str, str] = field(default_factory=dict, init=False)

    def add_usable(self) -> None:
        """Note a usable row. Raises `PromptDataError` for a bad row before it."""
        self._has_usable = True
        if self._first_bad is not None:
            self.bad_rows.report(*self._first_bad)

    def add_bad(self, origin: str, reason: str) -> None:
        """Count a bad row. After a usable row, this raises as `BadRows.report` does."""
        if self._has_usable or self.bad_rows.policy == "skip":
            self.bad_rows.report(origin, reason)
        elif self._first_bad is None:
            self._first_bad = (origin, reason)
        self.num_bad += 1
        if len(self._origin_by_reason) < _MAX_REASONS:
            self._origin_by_reason.setdefault(reason, origin)

    @property
    def examples(self) -> str:
        """The first bad row for each of the first reasons, each on a line of its own."""
        rows = self._origin_by_reason.items()
        return "".join(f"\n  {shorten(f'{origin}: {reason}')}" for reason, origin in rows)


def shorten(text: str) -> str:
    """Return one line of limited length."""
    if len(text) > _MAX_MESSAGE_CHARACTERS:
        text = f"{text[:_MAX_MESSAGE_CHARACTERS]}…"
    return " ".join(text.split())
