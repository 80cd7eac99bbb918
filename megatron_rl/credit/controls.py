"""Control experiments: batches from which nothing can be learned."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from megatron_rl.contracts.group import Group


def permute_rewards(groups: Sequence[Group], seed: int) -> list[Group]:
    """Shuffle the verdicts among all rollouts of the batch that have one.

    The batch keeps its rewards, and rollouts without a verdict stay without one. Only the
    assignment of rewards to responses is lost.
    """
    verdicts = [rollout.verdict for group in groups for rollout in group.rollouts_with_verdict]
    random.Random(seed).shuffle(verdicts)
    remaining = iter(verdicts)
    permuted_groups = []
    for group in groups:
        rollouts = tuple(
            rollout
            if rollout.verdict.reward is None
            else msgspec.structs.replace(rollout, verdict=next(remaining))
            for rollout in group.rollouts
        )
        permuted_groups.append(msgspec.structs.replace(group, rollouts=rollouts))
    return permuted_groups
