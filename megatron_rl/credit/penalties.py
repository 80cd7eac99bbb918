"""Penalties of one group's rollouts, from 0 to 1, for flaws other than an incorrect answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_rl.config.schema import CreditSettings
from megatron_rl.contracts.group import RolloutRef

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
# The multiple of the median length from which `credit.length=excess` penalizes a response
_DEFAULT_MULTIPLE = 1.5


@dataclass(frozen=True)
class Penalties:
    """Penalties that the section `credit` enables. Penalties that are off are 0.

    max_new_tokens: limit of a response's length, in tokens.
    """

    settings: CreditSettings
    max_new_tokens: int

    def length(self, rollouts: Sequence[RolloutRef], is_correct: Mask) -> Floats:
        """Compute the length penalty from the number of sampled tokens, float64 [n].

        is_correct: bool [n], rollouts whose median length `excess` compares with.

        `buffer` is 0 up to the last `length_start` tokens before the limit, then linear to 1 at the
        limit (DAPO, arXiv 2503.14476, Eq. 13). `excess` is 0 up to `length_start` times the median
        length, then linear to 1 at twice that length.
        """
        tokens = np.array([rollout.num_generated for rollout in rollouts], np.float64)
        if self.settings.length is None or not is_correct.any():
            return np.zeros_like(tokens)
        if self.settings.length == "buffer":
            buffer = self.settings.length_start or max(1, self.max_new_tokens // 5)
            return np.clip((tokens - (self.max_new_tokens - buffer)) / buffer, 0.0, 1.0)
        median = max(1.0, float(np.median(tokens[is_correct])))
        multiple = self.settings.length_start or _DEFAULT_MULTIPLE
        return np.clip(tokens / (multiple * median) - 1.0, 0.0, 1.0)

    def repetition(self, rollouts: Sequence[RolloutRef]) -> Floats:
        """Return the repetition that collectors measured (`RolloutRef.repetition`), float64 [n]."""
        if self.settings.repetition_ngram is None:
            return np.zeros(len(rollouts))
        return np.array([rollout.repetition for rollout in rollouts], np.float64)


def scorer_penalties(rollouts: Sequence[RolloutRef]) -> Floats:
    """Return the penalties that the scorer gave (`Verdict.penalty`), float64 [n], in [0, 1]."""
    return np.array([rollout.verdict.penalty for rollout in rollouts], np.float64)
