"""Probing a prompt with a few samples before drawing the rest, and what makes up for it."""

from __future__ import annotations

from math import comb


def mixed_probability(right: int, drawn: int, pilot: int) -> float:
    """The probability that `pilot` of `drawn` samples, chosen blindly, are mixed when `right` of all are right.

    P = 1 - [C(N - k, n0) + C(k, n0)] / C(N, n0)            k = right, N = drawn, n0 = pilot

    0 where all are right or wrong. Raises ValueError unless 2 <= pilot <= drawn and 0 <= right <= drawn.
    """
    if not (2 <= pilot <= drawn and 0 <= right <= drawn):
        raise ValueError(f"right={right}, drawn={drawn}, pilot={pilot}: 2 <= pilot <= drawn, 0 <= right <= drawn")
    return 1.0 - (comb(drawn - right, pilot) + comb(right, pilot)) / comb(drawn, pilot)


def screening_weight(right: int, drawn: int, pilot: int) -> float:
    """What a group's advantages are multiplied by when only mixed pilots are extended to `drawn` samples.

    1 / P(pilot mixed | k, N), at most N / n0: groups of few right or few wrong samples are stopped most often. With it
    the expected gradient is that of `drawn` samples for every prompt, for advantages that vanish on flat groups. Raises
    ValueError where the pilot cannot have been mixed.
    """
    probability = mixed_probability(right, drawn, pilot)
    if probability <= 0.0:
        raise ValueError(f"right={right} of drawn={drawn}: no pilot of {pilot} is mixed")
    return 1.0 / probability
