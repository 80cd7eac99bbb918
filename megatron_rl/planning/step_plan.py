"""Who trains what: judged rollouts become one `StepPlan`."""

from __future__ import annotations

import random
from collections.abc import Sequence

from megatron_rl.config.schema import ParallelSettings, TrainSettings
from megatron_rl.contracts.group import RolloutRef
from megatron_rl.contracts.plan import Denominators, OptimizerStep, StepPlan

_Bin = tuple[int, ...]


class Planner:
    """Plans training steps for `dp_size` data-parallel ranks. The order of rollouts follows from seed and step."""

    def __init__(self, train: TrainSettings, parallel: ParallelSettings, *, dp_size: int, seed: int) -> None:
        self._optimizer_steps = train.optimizer_steps_per_batch
        self._token_budget = train.tokens_per_micro_batch
        # Megatron's interleaved schedule takes a multiple of pp micro-batches
        self._multiple = parallel.pp if (parallel.vpp or 1) > 1 else 1
        self._dp_size = dp_size
        self._seed = seed

    def plan(self, step: int, rollouts: Sequence[RolloutRef], advantages: Sequence[float]) -> StepPlan:
        """Plan one training step.

        Rollouts without a trainable token or with zero advantage give no gradient and are left out. The others are
        shuffled and dealt to `train.optimizer_steps_per_batch` optimizer steps (fewer when there are fewer rollouts);
        within each, rollouts go to data-parallel ranks by token count and into micro-batches of at most
        `train.tokens_per_micro_batch` input tokens (a longer rollout has one to itself). No usable rollout gives a plan
        without optimizer steps: a skipped step.
        """
        useful = [
            (rollout, advantage)
            for rollout, advantage in zip(rollouts, advantages, strict=True)
            if advantage != 0.0 and rollout.num_trainable > 0
        ]
        random.Random(f"{self._seed}/{step}").shuffle(useful)
        kept = tuple(rollout for rollout, _ in useful)
        count = min(self._optimizer_steps, len(kept))
        return StepPlan(
            step=step,
            rollouts=kept,
            advantages=tuple(advantage for _, advantage in useful),
            optimizer_steps=tuple(self._optimizer_step(kept, range(i, len(kept), count)) for i in range(count)),
        )

    def _optimizer_step(self, rollouts: Sequence[RolloutRef], indices: Sequence[int]) -> OptimizerStep:
        lengths = {i: rollouts[i].num_inputs for i in indices}
        per_rank = [_pack(share, lengths, self._token_budget) for share in _balance(lengths, self._dp_size)]
        needed = max(1, *(len(bins) for bins in per_rank))
        needed += -needed % self._multiple
        return OptimizerStep(
            micro_batches=tuple(tuple(bins) + ((),) * (needed - len(bins)) for bins in per_rank),
            denominators=Denominators(sequences=len(indices), tokens=sum(rollouts[i].num_trainable for i in indices)),
        )


def _balance(lengths: dict[int, int], num_ranks: int) -> list[list[int]]:
    """Deal rollouts to ranks, longest first, each to the rank with the fewest tokens so far."""
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
