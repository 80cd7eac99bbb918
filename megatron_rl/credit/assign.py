"""From judged groups to the rollouts a step trains on, each with its advantage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.config.schema import AlgoSettings
from megatron_rl.contracts.group import Group, RolloutRef
from megatron_rl.credit.advantages import group_relative
from megatron_rl.credit.controls import permute_rewards
from megatron_rl.credit.kinds import Kind, kind_of


@dataclass(frozen=True)
class Credited:
    """Rollouts with their advantages, in the groups' order, and how many groups of each kind came in."""

    rollouts: tuple[RolloutRef, ...]
    advantages: tuple[float, ...]
    kinds: dict[Kind, int]

    def metrics(self) -> dict[str, float]:
        """Groups by kind, and the share of flat ones among those with enough verdicts to tell (0 without any)."""
        flat = self.kinds[Kind.FLAT_RIGHT] + self.kinds[Kind.FLAT_WRONG]
        told = flat + self.kinds[Kind.MIXED]
        counts = {f"rollout/groups/{kind}": float(count) for kind, count in self.kinds.items()}
        return counts | {"rollout/zero_variance_rate": flat / told if told else 0.0}


class Credit:
    """Assigns advantages by `algo.advantages`: relative to the group, or 1 for whatever has a verdict."""

    def __init__(self, algo: AlgoSettings, *, seed: int) -> None:
        self._algo = algo
        self._seed = seed

    def assign(self, step: int, groups: Sequence[Group]) -> Credited:
        """The rollouts of one batch that can teach something, with their advantages."""
        if self._algo.permute_rewards:
            groups = permute_rewards(groups, seed=self._seed * 1_000_003 + step)
        kinds = Counter(kind_of(group) for group in groups)
        credited = [pair for group in groups for pair in self._credit(group)]
        return Credited(
            rollouts=tuple(rollout for rollout, _ in credited),
            advantages=tuple(advantage for _, advantage in credited),
            kinds={kind: kinds[kind] for kind in Kind},
        )

    def _credit(self, group: Group) -> Iterator[tuple[RolloutRef, float]]:
        if self._algo.advantages == "one":
            return ((rollout, 1.0) for rollout in group.judged)
        if self._algo.zero_variance == "drop" and kind_of(group) is not Kind.MIXED:
            return iter(())
        rewards = np.array([r.verdict.reward for r in group.judged], np.float64)
        advantages = group_relative(rewards, normalize_std=self._algo.normalize_std)
        return zip(group.judged, advantages.tolist(), strict=True)
