"""Steps without a gradient: noticed while they come, and summed up at the end with what to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

_WARN_AFTER = 3
_REMEDIES = {
    "all_incorrect": "every answer is wrong: give easier questions, more rollout.samples_per_prompt or "
    "rollout.max_new_tokens, a start checkpoint that solves some, or look at reward.answer",
    "all_correct": "every answer is right: give harder questions",
    "tied_incorrect": "every answer is wrong, and some repeat themselves: give easier questions, or use "
    "credit.tied_incorrect=shape",
    "tied_correct": "every answer is right, of lengths that differ: give harder questions, or use "
    "credit.tied_correct=shape",
    "tied_reward": "all answers to a question have the same reward: look at what the reward tells apart",
    "too_few_verdicts": "the reward gives no verdicts, or rollouts are lost: see reward/no_verdict and "
    "rollout/rejected in metrics.jsonl, and raise reward.timeout_s if scoring takes longer",
    "mixed": "groups differ, but no token of them may be trained: raise rollout.max_new_tokens, or use "
    "rollout.train_truncated=true",
}


class UnchangedWeightsAlarm:
    """Counts the steps that trained nothing, and what their groups were."""

    def __init__(self) -> None:
        self._steps = self._idle = self._in_a_row = 0
        self._kinds: Counter[str] = Counter()

    def note(self, values: Mapping[str, float]) -> str | None:
        """Take in one step's metrics; a warning once several in a row trained nothing, and again as
        they double.
        """
        self._steps += 1
        if values.get("train/samples", 1.0):
            self._in_a_row = 0
            return None
        self._idle += 1
        self._in_a_row += 1
        self._kinds.update(
            {kind: int(values.get(f"rollout/groups/{kind}", 0.0)) for kind in _REMEDIES}
        )
        if self._in_a_row % _WARN_AFTER or (self._in_a_row // _WARN_AFTER).bit_count() != 1:
            return None
        return f"warning: {self._in_a_row} steps in a row trained nothing; {self._remedy()}"

    def summary(self) -> str | None:
        """What to say at the end of a run; None when every step trained something."""
        if not self._idle:
            return None
        return f"{self._idle} of {self._steps} steps trained nothing: {self._remedy()}"

    def _remedy(self) -> str:
        """About what most groups of those steps were."""
        return _REMEDIES[self._kinds.most_common(1)[0][0]]
