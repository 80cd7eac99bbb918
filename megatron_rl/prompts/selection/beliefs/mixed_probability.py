"""Probability that a prompt gives a mixed group in one step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rl.contracts.prompt import Prompt
from megatron_rl.prompts.selection.beliefs.arcsine import (
    Floats,
    all_correct_probability,
    mixed_probability,
)
from megatron_rl.prompts.selection.beliefs.beliefs import Beliefs
from megatron_rl.prompts.selection.beliefs.strata import Stratum, stratum_of


class MixedProbability:
    """Probabilities of one step, by the beliefs before its groups.

    counts: numbers of rollouts, first that of a whole group.
    """

    def __init__(self, beliefs: Beliefs, step: int, counts: Sequence[int]) -> None:
        self._beliefs = beliefs
        self._step = step
        self._counts = tuple(counts)
        self._has_group = beliefs.has_group()
        # Values that the prompts of a stratum share
        self._by_stratum_and_row: dict[Stratum, Floats] = {}
        self._by_stratum: dict[Stratum, tuple[float, ...]] = {}

    def for_prompt(self, prompt: Prompt, row: int) -> tuple[float, ...]:
        """Return the probability of a mixed group for each number of rollouts.

        The last value is the probability that a whole group is not all correct.

        row: the prompt's row in the beliefs.
        """
        stratum = stratum_of(prompt)
        if row < len(self._has_group) and self._has_group[row]:
            return tuple(self._of_rows(stratum)[:, row].tolist())
        if self._beliefs.external_estimate(prompt, self._step) is not None:
            return self._of_estimate(self._beliefs.initial_belief(prompt, self._step))
        if stratum not in self._by_stratum:
            prior = self._beliefs.stratum_prior(stratum)
            self._by_stratum[stratum] = self._of_estimate(prior)
        return self._by_stratum[stratum]

    def _of_rows(self, stratum: Stratum) -> Floats:
        """Return the values of all rows by the process noise of a stratum, [counts + 1, rows]."""
        if stratum not in self._by_stratum_and_row:
            process_noise = self._beliefs.stratum_process_noise(stratum)
            means, variances = self._beliefs.predict_all(self._step, process_noise)
            self._by_stratum_and_row[stratum] = self._values(means, variances)
        return self._by_stratum_and_row[stratum]

    def _of_estimate(self, estimate: tuple[float, float]) -> tuple[float, ...]:
        mean, variance = estimate
        return tuple(self._values(np.array([mean]), np.array([variance]))[:, 0].tolist())

    def _values(self, means: Floats, variances: Floats) -> Floats:
        mixed_values = [mixed_probability(means, variances, count) for count in self._counts]
        all_correct = all_correct_probability(means, variances, self._counts[0])
        return np.stack([*mixed_values, 1 - all_correct])
