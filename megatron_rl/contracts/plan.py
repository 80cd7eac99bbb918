"""Who trains what in one training step."""

from __future__ import annotations

import msgspec

from megatron_rl.contracts.group import RolloutRef
from megatron_rl.contracts.numbers import Count


class Denominators(msgspec.Struct, frozen=True, kw_only=True):
    """Global constants of one optimizer step's loss, fixed before its first micro-batch.

    sequences: rollouts with a verdict and a non-zero advantage on a trainable token. tokens: their trainable tokens.
    """

    sequences: Count
    tokens: Count


class OptimizerStep(msgspec.Struct, frozen=True, kw_only=True):
    """micro_batches[dp_rank][m] lists indices into `StepPlan.rollouts`; an empty tuple is a zero-loss filler.

    Every data-parallel rank has the same number of micro-batches.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    denominators: Denominators


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Who trains what in one training step. advantages[i] belongs to rollouts[i]."""

    step: Count
    rollouts: tuple[RolloutRef, ...]
    advantages: tuple[float, ...]
    optimizer_steps: tuple[OptimizerStep, ...]
