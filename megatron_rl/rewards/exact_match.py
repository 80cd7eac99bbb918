"""Scores a response by its final answer alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt, Question
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards.answers import (
    canonical,
    is_ambiguous,
    last_boxed,
    last_line,
    last_number,
    partial_number,
)
from megatron_rl.rewards.scorer import Scorer

_EXTRACTORS: Mapping[str, Callable[[str], str | None]] = {
    "last_number": last_number,
    "last_line": last_line,
    "boxed": last_boxed,
}


class ExactMatch(Scorer):
    """Rewards 1 if the final answer equals the reference answer, and 0 otherwise.

    answer: rule that finds the final answer: `last_number`, `last_line` or `boxed`.
    """

    def __init__(self, answer: str) -> None:
        self._rule = answer
        self._extract = _EXTRACTORS[answer]

    def check_answer(self, question: Question) -> None:
        """Raise ValueError if the rule finds no answer in a reference, or a part of the answer."""
        self.read_reference(question.answer)

    async def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        """Score a response. Only a response that ended by itself can be correct.

        Under `last_number`, a response whose last number is part of something longer has no answer.

        Raises ValueError for an unusable reference and for an aborted response.
        """
        if finish_reason is FinishReason.ABORT:
            raise ValueError("the response was aborted")
        reference = self.read_reference(prompt.answer)
        answer = self._extract(text) if finish_reason is FinishReason.STOP else None
        correctness = float(answer is not None and canonical(answer) == reference)
        return Verdict(reward=correctness, correctness=correctness, answer=answer)

    def read_reference(self, text: str) -> str:
        """Return the canonical reference answer. It may be bare or written like a response.

        Equal results are the same answer. Raises as `check_answer` does.
        """
        answer = self._extract(text)
        if answer is None and self._rule == "boxed":
            answer = text.strip() or None
        if self._rule == "last_number":
            self._check_number(text)
        if answer is None:
            raise ValueError(
                f"reward.answer={self._rule}: the reference answer {text[:80]!r} holds no answer. "
                "Choose the rule that fits the data"
            )
        return canonical(answer)

    def _check_number(self, text: str) -> None:
        """Raise ValueError if a reference is more than one number with decoration."""
        part = partial_number(text)
        if part is not None:
            raise ValueError(
                f"reward.answer={self._rule}: the reference answer {text[:80]!r} would be read as "
                f"{part!r}, a part of the answer. Write one number in plain digits, "
                "or choose reward.answer=last_line or boxed"
            )
        if is_ambiguous(text):
            raise ValueError(
                f"reward.answer={self._rule}: the reference answer {text[:80]!r} holds several "
                "numbers, or a letter that touches one. Write the final one alone or after ####, "
                "or choose reward.answer=last_line or boxed"
            )
