"""Plan of one training step: which rank trains which rollouts."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from megatron_rl.contracts.group import RolloutRef
from megatron_rl.contracts.wire_types import Count


class ExtraRollout(NamedTuple):
    """A rollout of a zero-variance group, trained in addition to those of mixed groups.

    entropy_advantage: see `StepPlan`. 0 except for rollouts of all-correct or all-incorrect groups
    that train by their tokens' entropies.
    """

    rollout: RolloutRef
    advantage: float
    entropy_advantage: float = 0.0


class Denominators(msgspec.Struct, frozen=True, kw_only=True):
    """Global constants that normalise one optimizer step's loss, fixed before its first pass.

    sequences: number of rollouts of mixed groups with a non-zero advantage on a trainable token,
    plus rollouts of zero-variance groups that are counted like them. If there is none, the number
    of all trained rollouts.
    tokens: number of trainable tokens of these rollouts.
    """

    sequences: Count
    tokens: Count


class OptimizerStep(msgspec.Struct, frozen=True, kw_only=True):
    """Micro-batches of one optimizer step.

    micro_batches: micro_batches[dp_rank][m] lists indices into `StepPlan.rollouts`. An empty tuple
    is a zero-loss filler, so that every data-parallel rank has the same number of micro-batches.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    denominators: Denominators


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of one training step.

    advantages: one for each rollout.
    entropy_advantages: one for each rollout, or empty if all are 0. α > 0 for a rollout of an
    all-correct group, -α for one of an all-incorrect group, 0 for others. The rollout's token
    advantages follow from α and the tokens' entropies.
    """

    step: Count
    rollouts: tuple[RolloutRef, ...]
    advantages: tuple[float, ...]
    optimizer_steps: tuple[OptimizerStep, ...]
    entropy_advantages: tuple[float, ...] = ()
