"""Control experiments: what a batch looks like when nothing can be learnt from it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from megatron_rl.contracts.group import Group


def permute_rewards(groups: Sequence[Group], seed: int) -> list[Group]:
    """Shuffle the verdicts among all rollouts of the batch that have one.

    The batch keeps its rewards and its rollouts without a verdict; which response earned which
    reward is lost.
    """
    verdicts = [r.verdict for group in groups for r in group.rollouts_with_verdict]
    random.Random(seed).shuffle(verdicts)
    remaining = iter(verdicts)
    return [
        msgspec.structs.replace(
            group,
            rollouts=tuple(
                msgspec.structs.replace(r, verdict=next(remaining))
                if r.verdict.reward is not None
                else r
                for r in group.rollouts
            ),
        )
        for group in groups
    ]
