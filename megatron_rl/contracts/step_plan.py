"""Who trains what in one training step."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from megatron_rl.contracts.group import RolloutRef
from megatron_rl.contracts.wire_types import Count


class ExtraRollout(NamedTuple):
    """A rollout of a group without a contrast: trained beside the others, which the loss is divided
    by.

    entropy_advantage: see `StepPlan`. Other than 0 it makes the rollout a flat one.
    """

    rollout: RolloutRef
    advantage: float
    entropy_advantage: float = 0.0


class Denominators(msgspec.Struct, frozen=True, kw_only=True):
    """Global constants of one optimizer step's loss, fixed before its first micro-batch.

    sequences: rollouts of mixed groups with a non-zero advantage on a trainable token, and flat
    ones that are kept; where there is none, all that are trained. tokens: their trainable tokens.
    """

    sequences: Count
    tokens: Count


class OptimizerStep(msgspec.Struct, frozen=True, kw_only=True):
    """micro_batches[dp_rank][m] lists indices into `StepPlan.rollouts`; an empty tuple is a
    zero-loss filler.

    Every data-parallel rank has the same number of micro-batches.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    denominators: Denominators


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Who trains what in one training step. advantages[i] belongs to rollouts[i].

    entropy_advantages[i]: α > 0 of a rollout of an all-right group, -α of an all-wrong one, 0 for
    others; its tokens' advantages follow from their entropies. Empty: 0 for all.
    """

    step: Count
    rollouts: tuple[RolloutRef, ...]
    advantages: tuple[float, ...]
    optimizer_steps: tuple[OptimizerStep, ...]
    entropy_advantages: tuple[float, ...] = ()
