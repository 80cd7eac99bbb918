"""Questions as text, prompts, and sampling parameters."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import msgspec

from sglang_bridge.request import Sampling

__all__ = [
    "ROW_KEYS",
    "Prompt",
    "Question",
    "ReadAnswer",
    "Sampling",
    "answer_as_written",
    "identity_of_text",
]

ROW_KEYS = (
    "prompt",
    "messages",
    "tools",
    "answer",
    "details",
    "response",
    "id",
    "task",
    "difficulty",
)
"""The keys of a row in a file of questions."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question as text.

    id: unique within a run's data.
    task, difficulty: free labels, by which metrics are grouped.
    identity: questions with the same identity are variants of one question and never fall on both
    sides of the train/held-out split. "" stands for the text without case and white space.
    origin: where the question comes from, for messages (`train.jsonl line 3`). "" stands for the
    id.
    demonstration: a correct response as the model writes it, "" if the source has none. Without an
    end-of-sequence token, it gets one.
    demonstration_problem: why the response of a row is no demonstration, "" if it is one.
    details: JSON text for the scorer alone, such as the tests of a program. No model reads it.
    """

    id: str
    text: str
    answer: str
    task: str
    difficulty: str = ""
    identity: str = ""
    origin: str = ""
    demonstration: str = ""
    demonstration_problem: str = ""
    details: str = ""

    def __post_init__(self) -> None:
        if not self.identity:
            object.__setattr__(self, "identity", identity_of_text(self.text))
        if not self.origin:
            object.__setattr__(self, "origin", self.id)


def identity_of_text(text: str) -> str:
    """Return a text without case and white space, which identifies a question."""
    return " ".join(text.casefold().split())


ReadAnswer = Callable[[Question], Hashable]
"""Reads a question's reference answer as the scorer does: equal results are the same answer.

Raises ValueError for an answer that responses cannot be compared with.
"""


def answer_as_written(question: Question) -> Hashable:
    """Return a reference answer as it is written, with the question's details."""
    return question.answer, question.details


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One question to the model.

    id: unique within a run's data.
    text: the tokens as text, for scorers.
    answer: reference answer, "" for a question that `details` alone judge.
    details: JSON text for the scorer alone, such as the tests of a program. No model reads it.
    task: name of the task or source.
    difficulty: free label by which metrics are grouped.
    demonstration: example response, empty if the source has none.
    source: name of the prompt's source in a mixture, empty without one.
    """

    id: str
    token_ids: tuple[int, ...]
    answer: str
    task: str
    difficulty: str = ""
    demonstration: str = ""
    source: str = ""
    details: str = ""
    text: str = ""
