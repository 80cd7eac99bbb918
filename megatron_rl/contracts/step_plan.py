"""Plan of one training step: which rank trains which rollouts."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from megatron_rl.contracts.group import RolloutRef
from megatron_rl.contracts.wire_types import Amount, Count


class ExtraRollout(NamedTuple):
    """A rollout of a zero-variance group that is trained or counted beside mixed groups.

    advantage: 0 for a rollout that only counts in the denominators.
    entropy_advantage: see `StepPlan`. 0 except for rollouts of all-correct or all-incorrect groups
    that train by their tokens' entropies.
    weight: weight of the rollout's group. It is a factor of `advantage` already.
    """

    rollout: RolloutRef
    advantage: float
    entropy_advantage: float = 0.0
    weight: float = 1.0


class Denominators(msgspec.Struct, frozen=True, kw_only=True):
    """Global constants that normalise one optimizer step's loss, fixed before its first pass.

    Each rollout counts with the weight of its group, which is 1 unless the selection of prompts
    gives another. The loss is therefore a weighted mean: Σ w A / Σ w.

    sequences: Σ w over the rollouts of mixed groups with a non-zero advantage on a trainable token,
    and over rollouts of zero-variance groups that are counted like them. If there is none, over all
    trained rollouts.
    tokens: Σ w n over these rollouts, n being the number of trainable tokens.
    """

    sequences: Amount
    tokens: Amount


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
    advantages follow from α, the tokens' entropies and the weight.
    weights: weights of the rollouts' groups, or empty if all are 1. They are factors of
    `advantages` already, but not of `entropy_advantages`.
    """

    step: Count
    rollouts: tuple[RolloutRef, ...]
    advantages: tuple[float, ...]
    optimizer_steps: tuple[OptimizerStep, ...]
    entropy_advantages: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
