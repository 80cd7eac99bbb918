"""Whose turn it is among the sources of a mixture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


class Shares:
    """Gives turns to sources, so that after any number of turns each has its share within one.

    The k-th turn of a source with the share w lies after (k - 1) / w and before k / w turns. Among
    the sources that may have a turn, the one whose turn ends first has it. Such windows can always
    be kept (Baruah et al., "Proportionate progress", Algorithmica 1996). Shares are exact
    fractions, so the choice is the same on every machine. tests/prompts/test_shares.py tries random
    weights.

    weights: positive, relative to each other.
    counts: number of turns of each source so far.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        fractions = [Fraction(str(weight)) for weight in weights]
        denominator = math.lcm(*(fraction.denominator for fraction in fractions))
        self._parts = [int(fraction * denominator) for fraction in fractions]
        self._whole = sum(self._parts)
        self.counts = [0] * len(weights)

    def next_source(self) -> int:
        """Return the index of the source whose turn it is, and count the turn."""
        turn = sum(self.counts)
        whole = self._whole
        deadline = None
        source = 0
        for index, (part, count) in enumerate(zip(self._parts, self.counts, strict=True)):
            if count * whole // part > turn:
                continue
            end = -(-(count + 1) * whole // part)
            if deadline is None or end < deadline:
                deadline = end
                source = index
        self.counts[source] += 1
        return source

    def most_in(self, index: int, turns: int) -> int:
        """Return the largest number of turns that a source can have among so many in a row."""
        if len(self._parts) == 1:
            return turns
        share = Fraction(self._parts[index], self._whole)
        return min(turns, math.ceil(share * turns) + 1)
