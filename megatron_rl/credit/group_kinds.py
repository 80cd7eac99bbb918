"""Kinds of groups by raw correctness, which decide whether and how a group trains.

Shaped rewards do not enter: a group must not train because of its penalties alone.
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

# A raw correctness of at least this counts as correct.
CORRECT_THRESHOLD = 0.5
# Penalties that differ by less within a group are noise. Dividing by their standard deviation
# would amplify it.
_MIN_PENALTY_RANGE = 0.2


class GroupKind(enum.StrEnum):
    """Kind of a group by the raw correctness of its rollouts with a verdict.

    Every group has exactly one kind.

    MIXED: the correctness differs. If no rollout has one, as with a reward model, the reward
    differs.
    TIED_CORRECT, TIED_INCORRECT: the correctness is the same for all rollouts, at least 0.5 or
    below, and an enabled penalty differs by 0.2 or more. The length penalty counts for correct
    answers, and the repetition penalty for incorrect ones.
    ALL_CORRECT, ALL_INCORRECT: the correctness is the same, and no such penalty differs as much.
    TIED_REWARD: no rollout has a correctness, and all rewards are equal.
    TOO_FEW_VERDICTS: fewer than two rollouts have a verdict.
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
    """Rollouts of a group that enter its statistics.

    has_correctness: the scores are raw correctness. If False, no rollout of the group has a
    correctness, and the scores are rewards.
    """

    rollouts: tuple[RolloutRef, ...]
    has_correctness: bool

    @classmethod
    def from_group(cls, group: Group) -> ScoredRollouts:
        """Select the rollouts with a finite score and a finite reward.

        If some rollouts have a correctness, rollouts without one do not count.
        """
        candidates = group.rollouts_with_verdict
        has_correctness = any(rollout.verdict.correctness is not None for rollout in candidates)
        rollouts = tuple(
            rollout
            for rollout in candidates
            if _is_scored(rollout, has_correctness=has_correctness)
        )
        return cls(rollouts, has_correctness)

    @cached_property
    def scores(self) -> npt.NDArray[np.float64]:
        """Raw scores, float64 [n]."""
        return np.array(
            [_score(rollout, has_correctness=self.has_correctness) for rollout in self.rollouts],
            np.float64,
        )


def kind_of(group: Group, penalties: Penalties | None = None) -> GroupKind:
    """Return the kind of a group. Without `penalties` no group is tied by a penalty."""
    scored_rollouts = ScoredRollouts.from_group(group)
    scores = scored_rollouts.scores
    if len(scores) < 2:
        return GroupKind.TOO_FEW_VERDICTS
    if scores.min() != scores.max():
        return GroupKind.MIXED
    if not scored_rollouts.has_correctness:
        return GroupKind.TIED_REWARD
    is_correct = bool(scores[0] >= CORRECT_THRESHOLD)
    if penalties is not None and _is_tied(scored_rollouts, penalties, is_correct=is_correct):
        return GroupKind.TIED_CORRECT if is_correct else GroupKind.TIED_INCORRECT
    return GroupKind.ALL_CORRECT if is_correct else GroupKind.ALL_INCORRECT


def _is_tied(scored_rollouts: ScoredRollouts, penalties: Penalties, *, is_correct: bool) -> bool:
    """Return True if the penalties of rollouts with equal scores differ enough to rank them."""
    if is_correct:
        values = penalties.length(scored_rollouts.rollouts, scored_rollouts.scores > -math.inf)
    else:
        values = penalties.repetition(scored_rollouts.rollouts)
    return bool(np.ptp(values) >= _MIN_PENALTY_RANGE)


def _score(rollout: RolloutRef, *, has_correctness: bool) -> float | None:
    return rollout.verdict.correctness if has_correctness else rollout.verdict.reward


def _is_scored(rollout: RolloutRef, *, has_correctness: bool) -> bool:
    score = _score(rollout, has_correctness=has_correctness)
    reward = rollout.verdict.reward
    return (
        score is not None and reward is not None and math.isfinite(score) and math.isfinite(reward)
    )
