"""Planner of training steps: turns rollouts with advantages into one `StepPlan`."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

from megatron_rl.config.schema import ParallelSettings, TrainSettings
from megatron_rl.contracts.group import RolloutRef
from megatron_rl.contracts.step_plan import Denominators, ExtraRollout, OptimizerStep, StepPlan

_Bin = tuple[int, ...]


class StepPlanner:
    """Plans training steps for `dp_size` data-parallel ranks.

    The order of the rollouts depends on the seed and the step alone.
    """

    def __init__(
        self, train: TrainSettings, parallel: ParallelSettings, *, dp_size: int, seed: int
    ) -> None:
        self._num_optimizer_steps = train.optimizer_steps_per_batch
        self._token_budget = train.tokens_per_micro_batch
        # Megatron's interleaved schedule needs a multiple of pp micro-batches.
        self._micro_batch_multiple = parallel.pp if (parallel.vpp or 1) > 1 else 1
        self._dp_size = dp_size
        self._seed = seed

    def plan(
        self,
        step: int,
        rollouts: Sequence[RolloutRef],
        advantages: Sequence[float],
        extra_rollouts: Sequence[ExtraRollout] = (),
        denominator_only: Sequence[ExtraRollout] = (),
        *,
        weights: Sequence[float] = (),
    ) -> StepPlan:
        """Plan one training step.

        Rollouts without a trainable token, or with advantage or weight zero, give no gradient and
        are not in the plan. The others are shuffled and dealt to `train.optimizer_steps_per_batch`
        optimizer steps, or to fewer if there are fewer rollouts. Within an optimizer step, rollouts
        go to data-parallel ranks by token count and into micro-batches of at most
        `train.tokens_per_micro_batch` input tokens. A longer rollout gets its own micro-batch. If
        no rollout is usable, the plan has no optimizer steps and the step is skipped.

        extra_rollouts: rollouts of tied and zero-variance groups, dealt evenly beside `rollouts`.
        Of either kind every optimizer step gets at most as many as of `rollouts`, sampled by seed.
        If `rollouts` has no usable rollout, all extra rollouts train.
        denominator_only: rollouts that do not train but count in the loss's denominators.
        weights: weights of the groups of `rollouts`, which are factors of `advantages` already.
        Empty: all are 1.

        Raises ValueError if `rollouts` and `advantages`, or weights, differ in length.
        """
        mixed_rollouts = [
            ExtraRollout(rollout, advantage, weight=weight)
            for rollout, advantage, weight in zip(
                rollouts, advantages, weights or [1.0] * len(rollouts), strict=True
            )
        ]
        sections = self._sections(step, mixed_rollouts, extra_rollouts)
        plan_rollouts = list(itertools.chain.from_iterable(sections))
        entropy_advantages = tuple(rollout.entropy_advantage for rollout in plan_rollouts)
        plan_weights = tuple(rollout.weight for rollout in plan_rollouts)
        has_weights = any(weight != 1.0 for weight in plan_weights)
        return StepPlan(
            step=step,
            rollouts=tuple(rollout.rollout for rollout in plan_rollouts),
            advantages=tuple(rollout.advantage for rollout in plan_rollouts),
            optimizer_steps=self._optimizer_steps(sections, denominator_only),
            entropy_advantages=entropy_advantages if any(entropy_advantages) else (),
            weights=plan_weights if has_weights else (),
        )

    def _sections(
        self,
        step: int,
        mixed_rollouts: Sequence[ExtraRollout],
        extra_rollouts: Sequence[ExtraRollout],
    ) -> list[list[ExtraRollout]]:
        """Shuffle the rollouts of each kind. Only the first section counts in the denominators."""
        tied_rollouts = [extra for extra in extra_rollouts if extra.entropy_advantage == 0.0]
        zero_variance_rollouts = [
            extra for extra in extra_rollouts if extra.entropy_advantage != 0.0
        ]
        mixed_section = self._shuffle_usable(f"{step}", mixed_rollouts)
        tied_section = self._shuffle_usable(f"{step}/tied", tied_rollouts)
        zero_variance_section = self._shuffle_usable(f"{step}/flat", zero_variance_rollouts)
        if not mixed_section:
            return [tied_section + zero_variance_section]
        limit = len(mixed_section)
        return [mixed_section, tied_section[:limit], zero_variance_section[:limit]]

    def _shuffle_usable(
        self, seed_suffix: str, rollouts: Sequence[ExtraRollout]
    ) -> list[ExtraRollout]:
        """Shuffle the rollouts that give a gradient and drop the others."""
        usable = [
            extra
            for extra in rollouts
            if (extra.advantage != 0.0 or extra.entropy_advantage != 0.0)
            and extra.weight > 0.0
            and extra.rollout.num_trainable > 0
        ]
        random.Random(f"{self._seed}/{seed_suffix}").shuffle(usable)
        return usable

    def _optimizer_steps(
        self, sections: Sequence[Sequence[ExtraRollout]], denominator_only: Sequence[ExtraRollout]
    ) -> tuple[OptimizerStep, ...]:
        """Deal each section evenly to the optimizer steps.

        sections: rollouts of the plan, in its order. The first section counts in the denominators.
        """
        rollouts = list(itertools.chain.from_iterable(sections))
        bounds = [0, *itertools.accumulate(len(section) for section in sections)]
        only_in_denominators = [
            extra for extra in denominator_only if extra.rollout.num_trainable > 0
        ]
        num_steps = min(self._num_optimizer_steps, len(sections[0]))
        steps = []
        for offset in range(num_steps):
            hands = [
                range(start + offset, stop, num_steps) for start, stop in itertools.pairwise(bounds)
            ]
            in_denominators = [rollouts[index] for index in hands[0]]
            in_denominators += only_in_denominators[offset::num_steps]
            indices = list(itertools.chain.from_iterable(hands))
            steps.append(self._optimizer_step(rollouts, indices, in_denominators))
        return tuple(steps)

    def _optimizer_step(
        self,
        rollouts: Sequence[ExtraRollout],
        indices: Sequence[int],
        in_denominators: Sequence[ExtraRollout],
    ) -> OptimizerStep:
        lengths = {i: rollouts[i].rollout.num_inputs for i in indices}
        bins_of_ranks = [
            _pack(share, lengths, self._token_budget) for share in _balance(lengths, self._dp_size)
        ]
        num_micro_batches = max(1, *(len(bins) for bins in bins_of_ranks))
        num_micro_batches += -num_micro_batches % self._micro_batch_multiple
        micro_batches = tuple(
            tuple(bins) + ((),) * (num_micro_batches - len(bins)) for bins in bins_of_ranks
        )
        denominators = Denominators(
            sequences=math.fsum(extra.weight for extra in in_denominators),
            tokens=math.fsum(
                extra.weight * extra.rollout.num_trainable for extra in in_denominators
            ),
        )
        return OptimizerStep(micro_batches=micro_batches, denominators=denominators)


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
    """Pack rollouts into bins of at most `budget` tokens by first-fit decreasing.

    indices: rollouts, longest first.
    """
    bins: list[list[int]] = []
    free_tokens: list[int] = []
    for index in indices:
        for position, free in enumerate(free_tokens):
            if lengths[index] <= free:
                bins[position].append(index)
                free_tokens[position] -= lengths[index]
                break
        else:
            bins.append([index])
            free_tokens.append(budget - lengths[index])
    return [tuple(members) for members in bins]
