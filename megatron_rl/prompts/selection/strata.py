"""What is believed of a prompt that was never asked: how those of its source and tag did at their
first time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_rl.contracts.prompt import Prompt
from megatron_rl.prompts.selection.arcsine import HIGHEST, WIDEST

Stratum = tuple[str, str]
StrataState = tuple[tuple[str, str, tuple[float, float, float, float]], ...]
_KEPT = 0.99  # of the weight of what was seen a step before
_NARROWEST = 0.02
_BORROWED = 4.0  # groups' worth of all strata in the belief of one
_ASSUMED = 2.0  # groups' worth of knowing nothing in the belief of all


def stratum_of(prompt: Prompt) -> Stratum:
    """Its source and its tag."""
    return prompt.task, prompt.difficulty


@dataclass
class Moments:
    """Discounted sums over first groups: of 1, z, z² and R (see `observation`)."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    noise: float = 0.0

    def numbers(self) -> tuple[float, float, float, float]:
        return self.count, self.total, self.squares, self.noise

    def add(self, seen: float, noise: float) -> None:
        self.count += 1
        self.total += seen
        self.squares += seen * seen
        self.noise += noise

    def blended(self, mean: float, variance: float, worth: float) -> tuple[float, float]:
        """Mean and variance of ψ, with `worth` groups' worth of the given ones mixed in."""
        count = self.count + worth
        own = (self.total + worth * mean) / count
        second = (self.squares - self.noise + worth * (variance + mean * mean)) / count
        return own, min(max(second - own * own, _NARROWEST), WIDEST)


@dataclass
class Strata:
    """Moments of every stratum and of all together."""

    _of: dict[Stratum, Moments] = field(default_factory=dict)
    _all: Moments = field(default_factory=Moments)

    def prior(self, stratum: Stratum) -> tuple[float, float]:
        """Mean and variance of ψ of a prompt that was never asked."""
        everywhere = self._all.blended(HIGHEST / 2, WIDEST, _ASSUMED)
        return self._of.get(stratum, Moments()).blended(*everywhere, _BORROWED)

    def add(self, stratum: Stratum, seen: float, noise: float) -> None:
        """A first group."""
        for moments in (self._of.setdefault(stratum, Moments()), self._all):
            moments.add(seen, noise)

    def fade(self, steps: int) -> None:
        """What was seen before weighs less: 0.99 for each step."""
        kept = _KEPT**steps
        for moments in (self._all, *self._of.values()):
            moments.count, moments.total, moments.squares, moments.noise = (
                kept * n for n in moments.numbers()
            )

    def state(self) -> StrataState:
        """Those of all together first."""
        named = ((task, tag, moments.numbers()) for (task, tag), moments in self._of.items())
        return (("", "", self._all.numbers()), *named)

    def restore(self, state: StrataState) -> None:
        self._all = Moments(*state[0][2])
        self._of = {(task, tag): Moments(*numbers) for task, tag, numbers in state[1:]}
