"""From judged groups to the rollouts a step trains on, each with its advantage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.config.algorithms import AlgoSettings
from megatron_rl.config.schema import CreditSettings
from megatron_rl.contracts.group import Group, RolloutRef
from megatron_rl.contracts.step_plan import ExtraRollout
from megatron_rl.credit.advantages import Floats, group_relative, shaped, tied
from megatron_rl.credit.controls import permute_rewards
from megatron_rl.credit.group_kinds import Kind, ScoredRollouts, kind_of
from megatron_rl.credit.penalties import Mask, Penalties, scorers_own

_WITHOUT_CONTRAST = (
    Kind.TIED_CORRECT,
    Kind.TIED_INCORRECT,
    Kind.ALL_CORRECT,
    Kind.ALL_INCORRECT,
    Kind.TIED_REWARD,
)


@dataclass(frozen=True)
class GroupCredit:
    """What one group or a batch of them is worth.

    rollouts, advantages: in the groups' order, of mixed groups (with algo.advantages=one: all with
    a verdict). uncounted: rollouts of tied and flat groups that train beside them. kept: flat ones
    that are counted as if they trained. changed: the size of what penalties did to advantages.
    size: that of the larger ones, with or without.
    """

    rollouts: tuple[RolloutRef, ...] = ()
    advantages: tuple[float, ...] = ()
    uncounted: tuple[ExtraRollout, ...] = ()
    kept: tuple[RolloutRef, ...] = ()
    changed: float = 0.0
    size: float = 0.0


@dataclass(frozen=True)
class BatchCredit(GroupCredit):
    """A batch. each: the kinds of its groups, in their order.

    no_correctness: rollouts without the raw correctness that others of their group have.
    """

    each: tuple[Kind, ...] = ()
    no_correctness: int = 0

    @property
    def kinds(self) -> dict[Kind, int]:
        """How many groups of each kind came in."""
        counts = Counter(self.each)
        return {kind: counts[kind] for kind in Kind}

    def metrics(self) -> dict[str, float]:
        """Groups by kind, and what shaping did.

        rollout/zero_variance_rate: the share of groups without a contrast among those with enough
        verdicts to tell (0 without any). reward/shaping_share: of the advantages' size, what
        penalties took, added or made. reward/no_correctness: such rollouts count as those without a
        verdict.
        """
        kinds = self.kinds
        flat = sum(kinds[kind] for kind in _WITHOUT_CONTRAST)
        told = flat + kinds[Kind.MIXED]
        return {
            **{f"rollout/groups/{kind}": float(count) for kind, count in kinds.items()},
            "rollout/zero_variance_rate": flat / told if told else 0.0,
            "reward/shaping_share": self.changed / self.size if self.size else 0.0,
            "reward/no_correctness": float(self.no_correctness),
        }


class Credit:
    """Assigns advantages by `algo.advantages`: relative to the group, or 1 for whatever has a
    verdict.

    settings: how groups without a contrast are treated, and shaping. max_new_tokens: the longest
    response.
    """

    def __init__(
        self,
        algo: AlgoSettings,
        settings: CreditSettings | None = None,
        *,
        seed: int,
        max_new_tokens: int = 1,
    ) -> None:
        settings = settings or CreditSettings()
        self._algo, self._seed = algo, seed
        self._penalties = Penalties(settings, max_new_tokens)
        self._strength, self._tied_scale = float(settings.shaping), float(settings.tied_scale)
        treatments = {
            Kind.TIED_CORRECT: settings.tied_correct,
            Kind.TIED_INCORRECT: settings.tied_incorrect,
            Kind.ALL_CORRECT: settings.all_correct,
            Kind.ALL_INCORRECT: settings.all_incorrect,
        }
        # A weight of 0 is none: what it would train is not even sent to a rank
        self._treatments = {
            kind: how for kind, how in treatments.items() if how != "zvp" or settings.zvp_alpha > 0
        }
        self._alpha = {
            Kind.ALL_CORRECT: settings.zvp_alpha,
            Kind.ALL_INCORRECT: -settings.zvp_alpha,
        }

    def assign(self, step: int, groups: Sequence[Group]) -> BatchCredit:
        """The rollouts of one batch that can teach something, with their advantages."""
        if self._algo.permute_rewards:
            groups = permute_rewards(groups, seed=self._seed * 1_000_003 + step)
        tolds = [ScoredRollouts.of(group) for group in groups]
        each = tuple(kind_of(group, self._penalties) for group in groups)
        worths = [self._worth(*found) for found in zip(groups, tolds, each, strict=True)]
        return BatchCredit(
            rollouts=tuple(r for worth in worths for r in worth.rollouts),
            advantages=tuple(a for worth in worths for a in worth.advantages),
            uncounted=tuple(u for worth in worths for u in worth.uncounted),
            kept=tuple(r for worth in worths for r in worth.kept),
            changed=sum(worth.changed for worth in worths),
            size=sum(worth.size for worth in worths),
            each=each,
            no_correctness=sum(
                len(g.rollouts_with_verdict) - len(told.rollouts) for g, told in zip(groups, tolds, strict=True)
            ),
        )

    def _worth(self, group: Group, told: ScoredRollouts, kind: Kind) -> GroupCredit:
        if self._algo.advantages == "one":
            return GroupCredit(rollouts=group.rollouts_with_verdict, advantages=(1.0,) * len(group.rollouts_with_verdict))
        if kind is Kind.MIXED:
            return self._of_mixed(told, group.weight)
        match self._treatments.get(kind, "drop"):
            case "shape":
                return self._of_tied(told, kind, group.weight)
            case "zvp":
                return GroupCredit(
                    uncounted=tuple(ExtraRollout(r, 0.0, self._alpha[kind]) for r in told.rollouts)
                )
            case "keep":
                return GroupCredit(kept=told.rollouts)
        return GroupCredit()

    def _of_mixed(self, told: ScoredRollouts, weight: float) -> GroupCredit:
        """Statistics on the raw scores; then penalties, by the sign that the statistics gave; then
        the weight.
        """
        raw = group_relative(told.scores, normalize_std=self._algo.normalize_std)
        advantages = raw
        if told.has_truth:
            length, repetition = self._found(told, raw > 0)
            found = np.where(raw > 0, length, repetition) + scorers_own(told.rollouts)
            advantages = shaped(raw, told.scores, found, strength=self._strength)
        changed, size = (
            np.abs(advantages - raw).sum(),
            np.maximum(np.abs(advantages), np.abs(raw)).sum(),
        )
        weighted = tuple((weight * advantages).tolist())
        return GroupCredit(
            rollouts=told.rollouts, advantages=weighted, changed=float(changed), size=float(size)
        )

    def _of_tied(self, told: ScoredRollouts, kind: Kind, weight: float) -> GroupCredit:
        """Right answers by length alone; wrong ones by repetition alone, for giving up early is no
        merit.
        """
        length, repetition = self._found(told, np.ones(len(told.rollouts), bool))
        advantages = tied(
            length if kind is Kind.TIED_CORRECT else repetition, scale=self._tied_scale
        )
        size = float(np.abs(advantages).sum())
        pairs = zip(told.rollouts, (weight * advantages).tolist(), strict=True)
        return GroupCredit(
            uncounted=tuple(ExtraRollout(r, a) for r, a in pairs), changed=size, size=size
        )

    def _found(self, told: ScoredRollouts, right: Mask) -> tuple[Floats, Floats]:
        return self._penalties.length(told.rollouts, right), self._penalties.repetition(
            told.rollouts
        )
