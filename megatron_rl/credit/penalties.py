"""Penalties from 0 to 1 of the rollouts of one group: what is wrong with an answer besides being
wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_rl.config.schema import CreditSettings
from megatron_rl.contracts.group import RolloutRef

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Penalties:
    """Those that `credit` switches on; the others are 0. max_new_tokens: the longest that a
    response may be.
    """

    settings: CreditSettings
    max_new_tokens: int

    def length(self, rollouts: Sequence[RolloutRef], right: Mask) -> Floats:
        """float64 [n], of tokens that engines drew; right bool [n]: whose median `excess` compares
        with.

        buffer: 0 up to the last `length_buffer` tokens, then linear to 1 at the limit (DAPO, arXiv
        2503.14476, Eq. 13). excess: 0 up to `length_excess` times the median, linear to 1 at twice
        that.
        """
        tokens = np.array([r.num_generated for r in rollouts], np.float64)
        if self.settings.length is None or not right.any():
            return np.zeros_like(tokens)
        if self.settings.length == "buffer":
            buffer = self.settings.length_buffer or max(1, self.max_new_tokens // 5)
            return np.clip((tokens - (self.max_new_tokens - buffer)) / buffer, 0.0, 1.0)
        allowed = self.settings.length_excess * max(1.0, float(np.median(tokens[right])))
        return np.clip(tokens / allowed - 1.0, 0.0, 1.0)

    def repetition(self, rollouts: Sequence[RolloutRef]) -> Floats:
        """float64 [n]: what the collectors measured, see `RolloutRef.repetition`."""
        if self.settings.repetition_ngram is None:
            return np.zeros(len(rollouts))
        return np.array([r.repetition for r in rollouts], np.float64)


def scorers_own(rollouts: Sequence[RolloutRef]) -> Floats:
    """float64 [n]: how far a scorer's reward is below its raw correctness, at most 1. A reward
    above it is none.
    """
    return np.clip([_below(r) for r in rollouts], 0.0, 1.0)


def _below(rollout: RolloutRef) -> float:
    correctness, reward = rollout.verdict.correctness, rollout.verdict.reward
    return 0.0 if correctness is None or reward is None else correctness - reward
