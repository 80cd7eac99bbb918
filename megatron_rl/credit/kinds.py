"""Which groups can teach anything, judged on raw correctness: filtering on shaped scores has destroyed policies."""

from __future__ import annotations

import enum

from megatron_rl.contracts.group import Group

_RIGHT = 0.5


class Kind(enum.StrEnum):
    """What a group's raw correctness looks like over its rollouts with a verdict.

    MIXED: it differs. FLAT_RIGHT, FLAT_WRONG: it is the same for all, at least 0.5 or below. TOO_FEW_VERDICTS: fewer
    than two rollouts have a verdict.
    """

    MIXED = "mixed"
    FLAT_RIGHT = "flat_right"
    FLAT_WRONG = "flat_wrong"
    TOO_FEW_VERDICTS = "too_few_verdicts"


def kind_of(group: Group) -> Kind:
    """The kind of one group."""
    scores = [r.verdict.correctness for r in group.judged if r.verdict.correctness is not None]
    if len(scores) < 2:
        return Kind.TOO_FEW_VERDICTS
    if min(scores) != max(scores):
        return Kind.MIXED
    return Kind.FLAT_RIGHT if scores[0] >= _RIGHT else Kind.FLAT_WRONG
