"""Right or wrong by the final answer alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards.answers import boxed, canonical, last_line, last_number, misread_number

_FINDERS: Mapping[str, Callable[[str], str | None]] = {
    "last_number": last_number,
    "last_line": last_line,
    "boxed": boxed,
}


class ExactMatch:
    """answer: where the final answer is looked for: `last_number`, `last_line` or `boxed`."""

    def __init__(self, answer: str) -> None:
        self._rule = answer
        self._find = _FINDERS[answer]

    def check_answer(self, answer: str) -> None:
        """Raise ValueError when this rule finds nothing in the reference answer itself, or a part
        of a number.
        """
        self._reference(answer)

    async def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        """Judge a response.

        Raises ValueError for an unusable reference and for a response that was aborted.
        """
        if finish_reason is FinishReason.ABORT:
            raise ValueError("the response was aborted")
        reference = self._reference(prompt.answer)
        found = self._find(text) if finish_reason is FinishReason.STOP else None
        correct = float(found is not None and canonical(found) == reference)
        return Verdict(reward=correct, correctness=correct, answer=found)

    def _reference(self, answer: str) -> str:
        """The reference by which answers are compared; a reference may be bare or written like a
        response.
        """
        found = self._find(answer)
        if found is None and self._rule == "boxed":
            found = answer.strip() or None
        if found is None:
            raise ValueError(
                f"reward.answer={self._rule}: the reference answer {answer[:80]!r} holds none. "
                "Choose the rule that fits the data"
            )
        if self._rule == "last_number" and misread_number(answer) is not None:
            raise ValueError(
                f"reward.answer={self._rule}: the reference answer {answer[:80]!r} would be read as {found!r}, a part "
                "of what is written. Write the number out in plain digits, or choose reward.answer=last_line"
            )
        return canonical(found)
