"""Importance weights, which compensate for prompts and groups that are sampled less often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb

from megatron_rl.contracts.group import Group
from megatron_rl.credit.group_kinds import CORRECT_THRESHOLD, ScoredRollouts


def pilot_mixed_probability(scores: Sequence[float], pilot: int) -> float:
    """Return the probability that `pilot` scores of a group, chosen at random, are not all equal.

    P = 1 - Σ_v C(c_v, n0) / C(N, n0)           c_v: number of the N scores that are v; n0 = pilot

    With scores of 0 and 1 this is 1 - [C(N - k, n0) + C(k, n0)] / C(N, n0).

    Raises ValueError unless 2 <= pilot <= N.
    """
    count = len(scores)
    if not 2 <= pilot <= count:
        raise ValueError(f"pilot={pilot} of {count} scores: 2 <= pilot <= scores must hold")
    equal_pilots = sum(comb(score_count, pilot) for score_count in Counter(scores).values())
    return 1.0 - equal_pilots / comb(count, pilot)


def pilot_not_all_correct_probability(scores: Sequence[float], pilot: int) -> float:
    """Return the probability that `pilot` random scores are not all correct and equal.

    P = 1 - Σ_(v >= 1/2) C(c_v, n0) / C(N, n0), as above, over scores that count as correct.

    Raises ValueError unless 1 <= pilot <= N.
    """
    count = len(scores)
    if not 1 <= pilot <= count:
        raise ValueError(f"pilot={pilot} of {count} scores: 1 <= pilot <= scores must hold")
    correct_pilots = sum(
        comb(score_count, pilot)
        for score, score_count in Counter(scores).items()
        if score >= CORRECT_THRESHOLD
    )
    return 1.0 - correct_pilots / comb(count, pilot)


def extension_weight(group: Group, probe: int, *, skip: str) -> float:
    """Return the factor of an extended group's advantages, 1 / P(pilot is extended | scores).

    The expected gradient over all probes of a prompt is then the same as with whole groups, for
    every advantage that vanishes if all scores are equal: the order of rollouts is independent of
    their scores, so every choice of a pilot is equally likely.

    Only rollouts with a verdict count. If `probe` rollouts gave fewer verdicts, the pilot has as
    many. For a mixed group the factor is at most the number of its verdicts divided by the pilot's
    number. The factor is 1 if the pilot has fewer than two of the verdicts, because its scorer
    found a correctness only later.

    probe: number of rollouts before the extension.
    skip: pilots that are not extended. `zero_variance`: all but mixed pilots. `all_correct`: those
    whose scores are all correct. Without any correctness, pilots with equal rewards are never
    extended.
    """
    scored_rollouts = ScoredRollouts.from_group(group)
    pilot = sum(rollout.sample_index < probe for rollout in scored_rollouts.rollouts)
    if pilot < 2:
        return 1.0
    scores = scored_rollouts.scores.tolist()
    if skip == "all_correct" and scored_rollouts.has_correctness:
        return 1.0 / pilot_not_all_correct_probability(scores, pilot)
    return 1.0 / pilot_mixed_probability(scores, pilot)


def stopped_weight(
    probe_chance: float, group_chance: float, *, probe: int, group_size: int
) -> float:
    """Return the factor of a probe that was stopped because its rollouts are equally correct.

    N / n0 · E[p^N] / E[p^n0]                                n0 = probe, N = group_size

    Given the probe, a whole group would have been equally correct with the probability
    E[p^N] / E[p^n0], and N of its rollouts would have been credited. The expectations are over the
    belief about p before the probe. So the expected credit is the same as with whole groups, if the
    belief is right.

    probe_chance, group_chance: E[p^n0] and E[p^N], or the same of 1 - p.
    """
    return group_size / probe * (group_chance / probe_chance) if probe_chance else 0.0


def effective_share(weights: Sequence[float]) -> float:
    """Return the effective sample size of weights as a share of their number.

    It is 1 if all weights are equal, and without any weight.
    """
    squares = sum(weight * weight for weight in weights)
    return sum(weights) ** 2 / (len(weights) * squares) if squares else 1.0
