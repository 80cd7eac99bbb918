"""Which groups can teach anything, judged on raw correctness.

Groups of equal correctness that are to train after all (RL-ZVP's entropy-shaped advantages for flat groups, small
bounded advantages for groups tied in correctness but not in shaped reward) each become a member of `Policy`, and of
`Kind` where they must be told apart; advantages are then chosen by kind, never two at once for one group.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.contracts.group import Group

_RIGHT = 0.5


class Kind(enum.StrEnum):
    """What a group's raw correctness looks like over its samples with a verdict.

    MIXED: it differs. FLAT_RIGHT, FLAT_WRONG: it is the same for all, at least 0.5 or below. TOO_FEW_VERDICTS: fewer
    than two samples have a verdict.
    """

    MIXED = "mixed"
    FLAT_RIGHT = "flat_right"
    FLAT_WRONG = "flat_wrong"
    TOO_FEW_VERDICTS = "too_few_verdicts"


class Policy(enum.StrEnum):
    """What happens to flat groups. DROP: they leave the step."""

    DROP = "drop"


@dataclass(frozen=True)
class Elimination:
    """kept: groups to train on, in their order. counts: how many groups of each kind came in (every kind is a key)."""

    kept: tuple[Group, ...]
    counts: dict[Kind, int]

    @property
    def zero_variance_rate(self) -> float:
        """Flat groups among those with enough verdicts to tell; 0 when there are none."""
        flat = self.counts[Kind.FLAT_RIGHT] + self.counts[Kind.FLAT_WRONG]
        judged = flat + self.counts[Kind.MIXED]
        return flat / judged if judged else 0.0


def classify(group: Group) -> Kind:
    """The kind of one group."""
    scores = [
        s.verdict.correctness
        for s in group.samples
        if s.verdict.reward is not None and s.verdict.correctness is not None
    ]
    if len(scores) < 2:
        return Kind.TOO_FEW_VERDICTS
    if min(scores) != max(scores):
        return Kind.MIXED
    return Kind.FLAT_RIGHT if scores[0] >= _RIGHT else Kind.FLAT_WRONG


def eliminate(groups: Sequence[Group], policy: str = Policy.DROP) -> Elimination:
    """Split groups by kind and keep those that the policy trains on. Raises ValueError for an unknown policy."""
    if policy not in set(Policy):
        raise ValueError(f"algo.zero_variance={policy}: there is no such policy. Choose one of {', '.join(Policy)}")
    kinds = [classify(group) for group in groups]
    counted = Counter(kinds)
    return Elimination(
        kept=tuple(group for group, kind in zip(groups, kinds, strict=True) if kind is Kind.MIXED),
        counts={kind: counted[kind] for kind in Kind},
    )
