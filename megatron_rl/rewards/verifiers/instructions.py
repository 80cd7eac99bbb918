"""Judges whether a response follows instructions about its form."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated

import msgspec

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt, Question
from megatron_rl.rewards.verifiers.constraints import AnyConstraint
from megatron_rl.rewards.verifiers.verifier import Verifier

_MAX_CHARACTERS = 200_000


class _Details(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Details of a row."""

    instructions: Annotated[list[AnyConstraint], msgspec.Meta(min_length=1, max_length=100)]


class InstructionsVerifier(Verifier):
    """Rewards the share of the row's instructions that a response satisfies.

    The row's details are {"instructions": [{"name": "words", "at_most": 50}, ...]}, with the names
    and arguments of `constraints.py`.

    strict: 1 if all are satisfied, and else 0. A response of more than 200,000 characters satisfies
    none.
    """

    def __init__(self, strict: bool = False) -> None:
        super().__init__()
        if not isinstance(strict, bool):
            raise ValueError(f"strict={strict!r}: give true or false")
        self._strict = strict

    def check_answer(self, question: Question) -> None:
        """Raise ValueError for details with unknown instructions or arguments, or without any."""
        try:
            _read(question.details)
        except msgspec.MsgspecError as error:
            raise ValueError(
                f"details {question.details[:80]!r}: {error}. Give them as "
                '{"instructions": [{"name": "words", "at_most": 50}]}, see docs/verifiers.md'
            ) from None

    def grade(self, prompt: Prompt, text: str) -> Verdict:
        """Count the instructions that a response satisfies."""
        constraints = _read(prompt.details)
        num_satisfied = 0
        if len(text) <= _MAX_CHARACTERS:
            num_satisfied = sum(constraint.holds(text) for constraint in constraints)
        share = num_satisfied / len(constraints)
        correctness = float(share == 1) if self._strict else share
        return Verdict(reward=correctness, correctness=correctness, answer=text)


@lru_cache(maxsize=64)
def _read(details: str) -> tuple[AnyConstraint, ...]:
    return tuple(msgspec.json.decode(details, type=_Details).instructions)
