"""What defines entropy groups, validated once and passed on as plain numbers.

Invariant: the size of a group is exact integer arithmetic on the fraction the user wrote, so that no backend and no
rounding of `q * n` decides it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

MAX_GROUPS = 16


@dataclass(frozen=True)
class GroupSettings:
    """bounds: cumulative fractions as (numerator, denominator); group j ends before rank ceil(n · bounds[j]).

    scale: α / log|V|, from mean entropy in nats to clip width. fixed_clip: replaces the entropy-adaptive width.
    """

    bounds: tuple[tuple[int, int], ...]
    scale: float
    min_clip: float
    fixed_clip: float | None

    @property
    def num_groups(self) -> int:
        return len(self.bounds) + 1

    def first_ranks(self, num_tokens: int) -> list[int]:
        """For each bound, how many of `num_tokens` tokens lie before it: ceil(n · q), at least 1 if n > 0."""
        return [(num_tokens * numerator + denominator - 1) // denominator for numerator, denominator in self.bounds]


def group_settings(
    vocab_size: int,
    alpha: float,
    fractions: tuple[float, ...] | list[float],
    min_clip: float,
    fixed_clip: float | None,
) -> GroupSettings:
    """Validate the arguments of `espo_groups`. Raises ValueError naming the argument."""
    if vocab_size < 2:
        raise ValueError(f"vocab_size={vocab_size}: must be at least 2 (log|V| divides the entropy)")
    for name, value in (("alpha", alpha), ("min_clip", min_clip), ("fixed_clip", fixed_clip)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}={value}: must be finite and not negative")
    if len(fractions) >= MAX_GROUPS:
        raise ValueError(f"fractions has {len(fractions)} entries: at most {MAX_GROUPS - 1} are supported")
    # A float such as 0.2 stands for the short fraction the user wrote, not for its binary neighbour.
    exact = [Fraction(float(fraction)).limit_denominator(1_000_000) for fraction in fractions]
    if any(not 0 < fraction < 1 for fraction in exact) or sum(exact) > 1:
        raise ValueError(f"fractions={tuple(fractions)}: each must lie between 0 and 1, their sum must not exceed 1")
    bounds = tuple((total.numerator, total.denominator) for total in accumulate(exact))
    return GroupSettings(bounds, alpha / math.log(vocab_size), min_clip, fixed_clip)
