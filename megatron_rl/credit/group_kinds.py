"""Which groups can teach anything, judged on raw correctness: filtering on shaped scores has
destroyed policies.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_rl.contracts.group import Group, RolloutRef
from megatron_rl.credit.penalties import Penalties

RIGHT = 0.5
_TELLING_RANGE = (
    0.2  # of a penalty within a group: less is noise, which dividing by a deviation would blow up
)


class Kind(enum.StrEnum):
    """What a group's raw correctness looks like over its rollouts with a verdict; every group is of
    exactly one kind.

    MIXED: it differs; without raw correctness, as a judge's reward has none, the reward differs.
    TIED_CORRECT, TIED_INCORRECT: it is the same for all, at least 0.5 or below, and a penalty that
    is switched on differs by 0.2 or more: length among right ones, repetition among wrong ones.
    ALL_CORRECT, ALL_INCORRECT: the same without such a difference. TIED_REWARD: no raw correctness
    and equal rewards. TOO_FEW_VERDICTS: fewer than two rollouts have a verdict.
    """

    MIXED = "mixed"
    TIED_CORRECT = "tied_correct"
    TIED_INCORRECT = "tied_incorrect"
    ALL_CORRECT = "all_correct"
    ALL_INCORRECT = "all_incorrect"
    TIED_REWARD = "tied_reward"
    TOO_FEW_VERDICTS = "too_few_verdicts"


@dataclass(frozen=True)
class ScoredRollouts:
    """The rollouts of a group that its statistics are over, and their raw scores.

    has_truth: the scores are raw correctness; else no rollout has any, and they are rewards.
    """

    rollouts: tuple[RolloutRef, ...]
    has_truth: bool

    @classmethod
    def of(cls, group: Group) -> ScoredRollouts:
        """Where some have a raw correctness, a rollout without a finite one has no verdict."""
        has_truth = any(r.verdict.correctness is not None for r in group.rollouts_with_verdict)
        return cls(tuple(r for r in group.rollouts_with_verdict if _is_told(r, has_truth=has_truth)), has_truth)

    @cached_property
    def scores(self) -> npt.NDArray[np.float64]:
        """float64 [n]."""
        return np.array([_score(r, has_truth=self.has_truth) for r in self.rollouts], np.float64)


def kind_of(group: Group, penalties: Penalties | None = None) -> Kind:
    """The kind of one group. penalties None: none is switched on."""
    told = ScoredRollouts.of(group)
    scores = told.scores
    if len(scores) < 2:
        return Kind.TOO_FEW_VERDICTS
    if scores.min() != scores.max():
        return Kind.MIXED
    if not told.has_truth:
        return Kind.TIED_REWARD
    right = bool(scores[0] >= RIGHT)
    if penalties is not None:
        found = (
            penalties.length(told.rollouts, scores > -math.inf)
            if right
            else penalties.repetition(told.rollouts)
        )
        if np.ptp(found) >= _TELLING_RANGE:
            return Kind.TIED_CORRECT if right else Kind.TIED_INCORRECT
    return Kind.ALL_CORRECT if right else Kind.ALL_INCORRECT


def _score(rollout: RolloutRef, *, has_truth: bool) -> float | None:
    return rollout.verdict.correctness if has_truth else rollout.verdict.reward


def _is_told(rollout: RolloutRef, *, has_truth: bool) -> bool:
    score, reward = _score(rollout, has_truth=has_truth), rollout.verdict.reward
    return (
        score is not None and reward is not None and math.isfinite(score) and math.isfinite(reward)
    )
