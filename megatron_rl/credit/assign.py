"""Credit assignment: turns judged groups into training rollouts with advantages."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.config.algorithms import AlgoSettings
from megatron_rl.config.schema import CreditSettings
from megatron_rl.contracts.group import Group, RolloutRef
from megatron_rl.contracts.step_plan import ExtraRollout
from megatron_rl.credit.advantages import (
    Floats,
    group_relative,
    shape_advantages,
    tied_advantages,
)
from megatron_rl.credit.group_kinds import GroupKind, ScoredRollouts, kind_of
from megatron_rl.credit.penalties import Penalties, scorer_penalties

_ZERO_VARIANCE_KINDS = (
    GroupKind.TIED_CORRECT,
    GroupKind.TIED_INCORRECT,
    GroupKind.ALL_CORRECT,
    GroupKind.ALL_INCORRECT,
    GroupKind.TIED_REWARD,
)


@dataclass(frozen=True)
class GroupCredit:
    """Training rollouts and advantages of one group, or of a batch of groups.

    rollouts, advantages, weights: rollouts of mixed groups, in the order of the groups, with their
    advantages and the weights of their groups, which are factors of the advantages already. If
    groups are not compared, they are all rollouts with a verdict.
    extra_rollouts: rollouts of tied and zero-variance groups that train beside them.
    denominator_only: rollouts of zero-variance groups that do not train but count in the loss's
    denominators.
    shaping_change: sum of the absolute changes that penalties made to advantages.
    advantage_size: sum of the absolute advantages, before or after shaping, whichever is larger.
    """

    rollouts: tuple[RolloutRef, ...] = ()
    advantages: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    extra_rollouts: tuple[ExtraRollout, ...] = ()
    denominator_only: tuple[ExtraRollout, ...] = ()
    shaping_change: float = 0.0
    advantage_size: float = 0.0


@dataclass(frozen=True)
class BatchCredit(GroupCredit):
    """Training rollouts and advantages of a batch.

    kinds: kinds of the batch's groups, in the order of the groups.
    num_without_correctness: number of rollouts without a raw correctness in groups where other
    rollouts have one.
    """

    kinds: tuple[GroupKind, ...] = ()
    num_without_correctness: int = 0

    @property
    def kind_counts(self) -> dict[GroupKind, int]:
        """Number of groups of each kind, including kinds without a group."""
        counts = Counter(self.kinds)
        return {kind: counts[kind] for kind in GroupKind}

    def metrics(self) -> dict[str, float]:
        """Return the number of groups by kind, and metrics of shaping.

        rollout/zero_variance_rate is the share of zero-variance groups among groups with at least
        two verdicts, 0 without such groups. reward/shaping_share is the share of the advantages'
        absolute size that penalties changed. reward/no_correctness is the number of rollouts that
        count as rollouts without a verdict, because only other rollouts of their group have a
        correctness.
        """
        counts = self.kind_counts
        num_zero_variance = sum(counts[kind] for kind in _ZERO_VARIANCE_KINDS)
        num_with_verdicts = num_zero_variance + counts[GroupKind.MIXED]
        return {
            **{f"rollout/groups/{kind}": float(count) for kind, count in counts.items()},
            "rollout/zero_variance_rate": (
                num_zero_variance / num_with_verdicts if num_with_verdicts else 0.0
            ),
            "reward/shaping_share": (
                self.shaping_change / self.advantage_size if self.advantage_size else 0.0
            ),
            "reward/no_correctness": float(self.num_without_correctness),
        }


class Credit:
    """Assigns advantages.

    compares_groups: advantages are relative to the group. Else they are 1 for every rollout with a
    verdict. settings: treatment of zero-variance groups, and shaping.
    max_new_tokens: limit of a response's length, in tokens.
    """

    def __init__(
        self,
        algo: AlgoSettings,
        settings: CreditSettings | None = None,
        *,
        max_new_tokens: int = 1,
        compares_groups: bool = True,
    ) -> None:
        settings = settings or CreditSettings()
        self._algo = algo
        self._compares_groups = compares_groups
        self._penalties = Penalties(settings, max_new_tokens)
        self._strength = float(settings.shaping)
        treatments = {
            GroupKind.TIED_CORRECT: settings.tied,
            GroupKind.TIED_INCORRECT: settings.tied,
            GroupKind.ALL_CORRECT: settings.all_correct,
            GroupKind.ALL_INCORRECT: settings.all_incorrect,
        }
        # An entropy advantage of 0 trains nothing, so these rollouts are not sent to any rank.
        self._treatments = {
            kind: treatment
            for kind, treatment in treatments.items()
            if treatment != "zvp" or settings.zvp_alpha > 0
        }
        self._entropy_advantages = {
            GroupKind.ALL_CORRECT: settings.zvp_alpha,
            GroupKind.ALL_INCORRECT: -settings.zvp_alpha,
        }

    def assign(self, groups: Sequence[Group], stopped_groups: Sequence[Group] = ()) -> BatchCredit:
        """Select the rollouts of one batch that train, and compute their advantages.

        stopped_groups: probes that were not extended. They train, or count in denominators, where
        whole groups that are all correct or all incorrect do.
        """
        scored_groups = [ScoredRollouts.from_group(group) for group in groups]
        kinds = tuple(kind_of(group, self._penalties) for group in groups)
        group_credits = [
            self._credit_group(group, scored_rollouts, kind)
            for group, scored_rollouts, kind in zip(groups, scored_groups, kinds, strict=True)
        ]
        group_credits += [self._credit_stopped(group) for group in stopped_groups]
        num_with_verdict = sum(len(group.rollouts_with_verdict) for group in groups)
        num_scored = sum(len(scored_rollouts.rollouts) for scored_rollouts in scored_groups)
        return _merge_credits(
            group_credits, kinds, num_without_correctness=num_with_verdict - num_scored
        )

    def _credit_group(
        self, group: Group, scored_rollouts: ScoredRollouts, kind: GroupKind
    ) -> GroupCredit:
        if not self._compares_groups:
            rollouts = group.rollouts_with_verdict
            ones = (1.0,) * len(rollouts)
            return GroupCredit(rollouts=rollouts, advantages=ones, weights=ones)
        if kind is GroupKind.MIXED:
            return self._credit_mixed(scored_rollouts, group.weight)
        match self._treatments.get(kind, "drop"):
            case "shape":
                return self._credit_tied(scored_rollouts, kind, group.weight)
            case "zvp":
                alpha = self._entropy_advantages[kind]
                extra_rollouts = (
                    ExtraRollout(rollout, 0.0, alpha, group.weight)
                    for rollout in scored_rollouts.rollouts
                )
                return GroupCredit(extra_rollouts=tuple(extra_rollouts))
            case "keep":
                kept_rollouts = (
                    ExtraRollout(rollout, 0.0, weight=group.weight)
                    for rollout in scored_rollouts.rollouts
                )
                return GroupCredit(denominator_only=tuple(kept_rollouts))
        return GroupCredit()

    def _credit_stopped(self, group: Group) -> GroupCredit:
        """Credit a probe that was not extended, if it is all correct or all incorrect."""
        kind = kind_of(group, self._penalties)
        if kind not in self._entropy_advantages:
            return GroupCredit()
        return self._credit_group(group, ScoredRollouts.from_group(group), kind)

    def _credit_mixed(self, scored_rollouts: ScoredRollouts, weight: float) -> GroupCredit:
        """Compute advantages from raw scores, shape them by penalties, then apply the weight.

        The sign of the unshaped advantage decides which penalty a rollout gets.
        """
        raw_advantages = group_relative(
            scored_rollouts.scores, normalize_std=self._algo.normalize_std
        )
        advantages = raw_advantages
        if scored_rollouts.has_correctness:
            penalties = self._mixed_penalties(scored_rollouts, raw_advantages)
            advantages = shape_advantages(
                raw_advantages, scored_rollouts.scores, penalties, strength=self._strength
            )
        shaping_change = np.abs(advantages - raw_advantages).sum()
        advantage_size = np.maximum(np.abs(advantages), np.abs(raw_advantages)).sum()
        return GroupCredit(
            rollouts=scored_rollouts.rollouts,
            advantages=tuple((weight * advantages).tolist()),
            weights=(weight,) * len(scored_rollouts.rollouts),
            shaping_change=float(shaping_change),
            advantage_size=float(advantage_size),
        )

    def _mixed_penalties(self, scored_rollouts: ScoredRollouts, advantages: Floats) -> Floats:
        """Return the length penalty of positive advantages and the repetition penalty of others.

        Both include the penalty of the scorer.
        """
        is_positive = advantages > 0
        length = self._penalties.length(scored_rollouts.rollouts, is_positive)
        repetition = self._penalties.repetition(scored_rollouts.rollouts)
        return np.where(is_positive, length, repetition) + scorer_penalties(
            scored_rollouts.rollouts
        )

    def _credit_tied(
        self, scored_rollouts: ScoredRollouts, kind: GroupKind, weight: float
    ) -> GroupCredit:
        """Rank correct answers by length and incorrect answers by repetition.

        Length does not rank incorrect answers, so giving up early earns no reward.
        """
        if kind is GroupKind.TIED_CORRECT:
            is_correct = np.ones(len(scored_rollouts.rollouts), bool)
            penalties = self._penalties.length(scored_rollouts.rollouts, is_correct)
        else:
            penalties = self._penalties.repetition(scored_rollouts.rollouts)
        advantages = tied_advantages(penalties)
        size = float(np.abs(advantages).sum())
        pairs = zip(scored_rollouts.rollouts, (weight * advantages).tolist(), strict=True)
        return GroupCredit(
            extra_rollouts=tuple(
                ExtraRollout(rollout, advantage, weight=weight) for rollout, advantage in pairs
            ),
            shaping_change=size,
            advantage_size=size,
        )


def _merge_credits(
    group_credits: Sequence[GroupCredit],
    kinds: tuple[GroupKind, ...],
    *,
    num_without_correctness: int,
) -> BatchCredit:
    chain = itertools.chain.from_iterable
    return BatchCredit(
        rollouts=tuple(chain(credit.rollouts for credit in group_credits)),
        advantages=tuple(chain(credit.advantages for credit in group_credits)),
        weights=tuple(chain(credit.weights for credit in group_credits)),
        extra_rollouts=tuple(chain(credit.extra_rollouts for credit in group_credits)),
        denominator_only=tuple(chain(credit.denominator_only for credit in group_credits)),
        shaping_change=sum(credit.shaping_change for credit in group_credits),
        advantage_size=sum(credit.advantage_size for credit in group_credits),
        kinds=kinds,
        num_without_correctness=num_without_correctness,
    )
