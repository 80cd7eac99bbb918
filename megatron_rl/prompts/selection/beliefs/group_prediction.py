"""Probabilities of the kinds of a group, by the belief about its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.contracts.prompt import Prompt
from megatron_rl.prompts.selection.beliefs.arcsine import (
    all_correct_probability,
    all_incorrect_probability,
)
from megatron_rl.prompts.selection.beliefs.beliefs import Beliefs


@dataclass(frozen=True)
class GroupPrediction:
    """Probabilities that some rollouts of a prompt are all correct or all incorrect."""

    all_correct: float
    all_incorrect: float

    @property
    def mixed_probability(self) -> float:
        """Probability that they are neither all correct nor all incorrect."""
        return max(0.0, 1.0 - (self.all_correct + self.all_incorrect))


class GroupPredictions:
    """Predictions for the prompts of one step, by the beliefs before its groups.

    Only prompts that are offered cost time, however many there are.

    counts: numbers of rollouts.
    """

    def __init__(self, beliefs: Beliefs, step: int, counts: Sequence[int]) -> None:
        self._beliefs = beliefs
        self._step = step
        self._counts = tuple(counts)

    def of(self, prompt: Prompt, row: int) -> tuple[GroupPrediction, ...]:
        """Return a prediction for each number of rollouts of a prompt. row: see `Beliefs.row`."""
        mean, variance = self._beliefs.estimate(prompt, row, self._step)
        return tuple(
            GroupPrediction(
                all_correct_probability(mean, variance, count),
                all_incorrect_probability(mean, variance, count),
            )
            for count in self._counts
        )
