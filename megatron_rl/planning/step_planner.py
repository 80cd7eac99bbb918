"""Who trains what: judged rollouts become one `StepPlan`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from megatron_rl.config.schema import ParallelSettings, TrainSettings
from megatron_rl.contracts.group import RolloutRef
from megatron_rl.contracts.step_plan import Denominators, ExtraRollout, OptimizerStep, StepPlan

_Bin = tuple[int, ...]


class StepPlanner:
    """Plans training steps for `dp_size` data-parallel ranks.

    The order of rollouts follows from seed and step.
    """

    def __init__(
        self, train: TrainSettings, parallel: ParallelSettings, *, dp_size: int, seed: int
    ) -> None:
        self._optimizer_steps = train.optimizer_steps_per_batch
        self._token_budget = train.tokens_per_micro_batch
        # Megatron's interleaved schedule takes a multiple of pp micro-batches
        self._multiple = parallel.pp if (parallel.vpp or 1) > 1 else 1
        self._dp_size = dp_size
        self._seed = seed

    def plan(
        self,
        step: int,
        rollouts: Sequence[RolloutRef],
        advantages: Sequence[float],
        uncounted: Sequence[ExtraRollout] = (),
        kept: Sequence[RolloutRef] = (),
    ) -> StepPlan:
        """Plan one training step.

        Rollouts without a trainable token or with zero advantage give no gradient and are left out.
        The others are shuffled and dealt to `train.optimizer_steps_per_batch` optimizer steps
        (fewer when there are fewer rollouts); within each, rollouts go to data-parallel ranks by
        token count and into micro-batches of at most `train.tokens_per_micro_batch` input tokens (a
        longer rollout has one to itself). No usable rollout gives a plan without optimizer steps: a
        skipped step.

        uncounted: dealt evenly beside them, of tied and of flat ones each at most as many as of the
        others in every optimizer step, drawn by seed; where there are no others, all of them. kept:
        counted and not trained.
        """
        counted = self._useful(
            step, "", [ExtraRollout(*pair) for pair in zip(rollouts, advantages, strict=True)]
        )
        of_tied = self._useful(step, "/tied", [u for u in uncounted if u.entropy_advantage == 0.0])
        of_flat = self._useful(step, "/flat", [u for u in uncounted if u.entropy_advantage != 0.0])
        most = len(counted)  # the first sort is what the loss is divided by
        sorts = [counted, of_tied[:most], of_flat[:most]] if counted else [[*of_tied, *of_flat]]
        starts = [0, *itertools.accumulate(len(sort) for sort in sorts)]
        trained, count = [*itertools.chain(*sorts)], min(self._optimizer_steps, len(sorts[0]))
        refs, only_counted = (
            tuple(u.rollout for u in trained),
            [r for r in kept if r.num_trainable > 0],
        )
        steps = []
        for i in range(count):
            dealt = [range(start + i, stop, count) for start, stop in itertools.pairwise(starts)]
            counts = [*(refs[index] for index in dealt[0]), *only_counted[i::count]]
            steps.append(self._optimizer_step(refs, [*itertools.chain(*dealt)], counts))
        return StepPlan(
            step=step,
            rollouts=refs,
            advantages=tuple(u.advantage for u in trained),
            optimizer_steps=tuple(steps),
            entropy_advantages=tuple(u.entropy_advantage for u in trained) if of_flat else (),
        )

    def _useful(self, step: int, sort: str, rollouts: Sequence[ExtraRollout]) -> list[ExtraRollout]:
        """Those that give a gradient, shuffled."""
        found = [
            u
            for u in rollouts
            if (u.advantage, u.entropy_advantage) != (0.0, 0.0) and u.rollout.num_trainable > 0
        ]
        random.Random(f"{self._seed}/{step}{sort}").shuffle(found)
        return found

    def _optimizer_step(
        self, rollouts: Sequence[RolloutRef], indices: Sequence[int], counted: Sequence[RolloutRef]
    ) -> OptimizerStep:
        lengths = {i: rollouts[i].num_inputs for i in indices}
        per_rank = [
            _pack(share, lengths, self._token_budget) for share in _balance(lengths, self._dp_size)
        ]
        needed = max(1, *(len(bins) for bins in per_rank))
        needed += -needed % self._multiple
        return OptimizerStep(
            micro_batches=tuple(tuple(bins) + ((),) * (needed - len(bins)) for bins in per_rank),
            denominators=Denominators(
                sequences=len(counted), tokens=sum(r.num_trainable for r in counted)
            ),
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
