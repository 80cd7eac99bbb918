"""Settings of entropy groups, validated once and passed on as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from numbers import Integral

MAX_GROUPS = 16
MAX_DENOMINATOR = 1_000_000


@dataclass(frozen=True)
class GroupSettings:
    """Settings of `espo_groups` as plain numbers.

    bounds: cumulative fractions as (numerator, denominator); group j ends before rank ceil(n ·
    bounds[j]).

    scale: α / log|V|, from mean entropy in nats to clip width. fixed_clip: replaces the
    entropy-adaptive width.
    """

    bounds: tuple[tuple[int, int], ...]
    scale: float
    min_clip: float
    fixed_clip: float | None

    @property
    def num_groups(self) -> int:
        return len(self.bounds) + 1

    def first_ranks(self, num_tokens: int) -> list[int]:
        """The number of tokens before each bound: ceil(n · q), at least 1 if n > 0."""
        return [
            (num_tokens * numerator + denominator - 1) // denominator
            for numerator, denominator in self.bounds
        ]


def group_settings(
    vocab_size: int,
    alpha: float,
    fractions: Sequence[float],
    min_clip: float,
    fixed_clip: float | None,
) -> GroupSettings:
    """Validate the arguments of `espo_groups`.

    Raises ValueError or TypeError naming the argument.
    """
    if not isinstance(vocab_size, Integral) or vocab_size < 2:
        raise ValueError(
            f"vocab_size={vocab_size}: must be an integer of at least 2 "
            "(log|V| divides the entropy)"
        )
    for name, value in (("alpha", alpha), ("min_clip", min_clip), ("fixed_clip", fixed_clip)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}={value}: must be finite and not negative")
    return GroupSettings(_bounds(fractions), alpha / math.log(vocab_size), min_clip, fixed_clip)


def _bounds(fractions: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """See `GroupSettings`. Raises ValueError or TypeError naming the fractions."""
    try:
        shares = tuple(float(fraction) for fraction in fractions)
    except (TypeError, ValueError):
        raise TypeError(f"fractions={fractions!r}: must be a sequence of numbers") from None
    if len(shares) >= MAX_GROUPS:
        raise ValueError(
            f"fractions has {len(shares)} entries: at most {MAX_GROUPS - 1} are supported"
        )
    if any(not 1 / MAX_DENOMINATOR <= share <= 1 - 1 / MAX_DENOMINATOR for share in shares):
        raise ValueError(
            f"fractions={shares}: each must lie between 1e-6 and 1 - 1e-6, "
            "their sum must not exceed 1"
        )
    # A float such as 0.2 stands for the short fraction the user wrote, not for its binary
    # neighbour. Sums of unrelated fractions have long denominators, and are shortened too.
    exact = accumulate(Fraction(share).limit_denominator(MAX_DENOMINATOR) for share in shares)
    bounds = [total.limit_denominator(MAX_DENOMINATOR) for total in exact]
    if bounds and bounds[-1] > 1:
        raise ValueError(f"fractions={shares}: their sum is {sum(shares)}, and must not exceed 1")
    return tuple((bound.numerator, bound.denominator) for bound in bounds)
