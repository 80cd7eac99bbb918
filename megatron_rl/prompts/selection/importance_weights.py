"""What makes up for groups that were stopped after a probe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb

from megatron_rl.contracts.group import Group
from megatron_rl.credit.group_kinds import RIGHT, ScoredRollouts


def pilot_mixed_probability(scores: Sequence[float], pilot: int) -> float:
    """The probability that `pilot` of a group's judged `scores`, chosen blindly, are not all equal.

    P = 1 - Σ_v C(c_v, n0) / C(N, n0)           c_v: how many of the N scores are v; n0 = pilot

    With scores of 0 and 1: 1 - [C(N - k, n0) + C(k, n0)] / C(N, n0). Raises ValueError unless 2 <=
    pilot <= N.
    """
    drawn = len(scores)
    if not 2 <= pilot <= drawn:
        raise ValueError(f"pilot={pilot} of {drawn} scores: 2 <= pilot <= scores")
    return 1.0 - sum(comb(count, pilot) for count in Counter(scores).values()) / comb(drawn, pilot)


def pilot_unsolved_probability(scores: Sequence[float], pilot: int) -> float:
    """The probability that `pilot` of a group's judged `scores`, chosen blindly, are not all right
    and equal.

    P = 1 - Σ_(v >= 1/2) C(c_v, n0) / C(N, n0): as above, of the values that are right. Raises
    ValueError as above.
    """
    drawn = len(scores)
    if not 1 <= pilot <= drawn:
        raise ValueError(f"pilot={pilot} of {drawn} scores: 1 <= pilot <= scores")
    right = (count for score, count in Counter(scores).items() if score >= RIGHT)
    return 1.0 - sum(comb(count, pilot) for count in right) / comb(drawn, pilot)


def extension_weight(group: Group, probe: int, *, skip: str) -> float:
    """What an extended group's advantages are multiplied by: 1 / P(pilot extended | its scores), at
    most N / n0.

    skip: what is not extended: `flat`, all but mixed pilots; `solved`, those that are all right.

    Where no truth is known nothing is right, and ties of a judge are not extended either way.

    Of the verdicts alone: where `probe` rollouts gave fewer of them, the pilot is those. The order
    of rollouts says nothing of their scores, so every choice of a pilot was as likely as this one,
    and the expected gradient over all probes of a prompt is that of full groups, for every
    advantage that vanishes where all scores are equal. 1 where the pilot has fewer than two of the
    verdicts, because its scorer found the truth only later.
    """
    told = ScoredRollouts.of(group)
    pilot = sum(r.sample_index < probe for r in told.rollouts)
    if pilot < 2:
        return 1.0
    probability = (
        pilot_unsolved_probability
        if skip == "all_correct" and told.has_truth
        else pilot_mixed_probability
    )
    return 1.0 / probability(told.scores.tolist(), pilot)


def effective_share(weights: Sequence[float]) -> float:
    """The effective sample size of weights, as a share of their number: 1 where all are equal, and
    without any.
    """
    squares = sum(w * w for w in weights)
    return sum(weights) ** 2 / (len(weights) * squares) if squares else 1.0
