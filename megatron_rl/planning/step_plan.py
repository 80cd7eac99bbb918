"""Who trains what: judged samples become one `StepPlan`."""

from __future__ import annotations

import random
from collections.abc import Sequence

from megatron_rl.contracts.group import RolloutRef
from megatron_rl.contracts.plan import Denominators, OptimizerStep, StepPlan

_Bin = tuple[int, ...]


def plan_step(
    step: int,
    samples: Sequence[RolloutRef],
    advantages: Sequence[float],
    *,
    dp_size: int,
    optimizer_steps: int,
    tokens_per_micro_batch: int,
    micro_batch_multiple: int = 1,
    seed: int = 0,
) -> StepPlan:
    """Plan one training step.

    Samples without a trainable token or with zero advantage give no gradient and are left out. The others are shuffled
    and dealt to `optimizer_steps` optimizer steps (fewer when there are fewer samples); within each, samples go to
    data-parallel ranks by token count and into micro-batches of at most `tokens_per_micro_batch` input tokens (a longer
    sample has one to itself). micro_batch_multiple: the number of micro-batches is a multiple of it (virtual pipeline
    stages need one). No usable sample gives a plan without optimizer steps: a skipped step.
    """
    useful = [
        (sample, advantage)
        for sample, advantage in zip(samples, advantages, strict=True)
        if advantage != 0.0 and sample.num_trainable > 0
    ]
    random.Random(f"{seed}/{step}").shuffle(useful)
    kept = tuple(sample for sample, _ in useful)
    count = min(optimizer_steps, len(kept))
    return StepPlan(
        step=step,
        samples=kept,
        advantages=tuple(advantage for _, advantage in useful),
        optimizer_steps=tuple(
            _plan_optimizer_step(
                kept, range(i, len(kept), count), dp_size, tokens_per_micro_batch, micro_batch_multiple
            )
            for i in range(count)
        ),
    )


def _plan_optimizer_step(
    samples: Sequence[RolloutRef], indices: Sequence[int], dp_size: int, token_budget: int, multiple: int
) -> OptimizerStep:
    lengths = {i: samples[i].num_inputs for i in indices}
    per_rank = [_pack(share, lengths, token_budget) for share in _balance(lengths, dp_size)]
    needed = max(1, *(len(bins) for bins in per_rank))
    needed += -needed % multiple
    return OptimizerStep(
        micro_batches=tuple(tuple(bins) + ((),) * (needed - len(bins)) for bins in per_rank),
        denominators=Denominators(sequences=len(indices), tokens=sum(samples[i].num_trainable for i in indices)),
    )


def _balance(lengths: dict[int, int], num_ranks: int) -> list[list[int]]:
    """Deal samples to ranks, longest first, each to the rank with the fewest tokens so far."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for index in sorted(lengths, key=lambda i: (-lengths[i], i)):
        rank = min(range(num_ranks), key=lambda r: (totals[r], r))
        shares[rank].append(index)
        totals[rank] += lengths[index]
    return shares


def _pack(indices: Sequence[int], lengths: dict[int, int], budget: int) -> list[_Bin]:
    """First-fit decreasing into bins of at most `budget` tokens; `indices` come longest first."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in indices:
        for position, free in enumerate(room):
            if lengths[index] <= free:
                bins[position].append(index)
                room[position] -= lengths[index]
                break
        else:
            bins.append([index])
            room.append(budget - lengths[index])
    return [tuple(members) for members in bins]
