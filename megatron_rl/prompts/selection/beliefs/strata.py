"""Strata of prompts: the initial belief of a prompt that was never sampled.

It follows from the first groups of other prompts with the same source and tag.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_rl.contracts.prompt import Prompt
from megatron_rl.prompts.selection.beliefs.arcsine import MAX_ANGLE, MAX_VARIANCE

Stratum = tuple[str, str]
_MomentSums = tuple[float, float, float, float]
StrataState = tuple[tuple[str, str, _MomentSums], ...]

_DECAY = 0.99  # factor per step of the weight of past groups
_MIN_VARIANCE = 0.02
_SHARED_WEIGHT = 4.0  # weight of the shared prior in a stratum's prior, in groups
_UNINFORMATIVE_WEIGHT = 2.0  # weight of the uninformative belief in the shared prior, in groups


def stratum_of(prompt: Prompt) -> Stratum:
    """Return the source and the tag of a prompt."""
    return prompt.task, prompt.difficulty


@dataclass
class Moments:
    """Sums over first groups, with exponential decay: of 1, z, z² and R (see `observation`)."""

    count: float = 0.0
    angles: float = 0.0
    squares: float = 0.0
    noise: float = 0.0

    def sums(self) -> _MomentSums:
        return self.count, self.angles, self.squares, self.noise

    def add(self, angle: float, noise: float) -> None:
        """Add a first group."""
        self.count += 1
        self.angles += angle
        self.squares += angle * angle
        self.noise += noise

    def decay(self, factor: float) -> None:
        """Multiply all sums by a factor."""
        self.count *= factor
        self.angles *= factor
        self.squares *= factor
        self.noise *= factor

    def shrink_towards(self, mean: float, variance: float, weight: float) -> tuple[float, float]:
        """Return the mean and the variance of ψ, shrunk towards a prior.

        weight: weight of the prior, in groups.
        """
        count = self.count + weight
        new_mean = (self.angles + weight * mean) / count
        second_moment = self.squares - self.noise + weight * (variance + mean * mean)
        new_variance = second_moment / count - new_mean * new_mean
        return new_mean, min(max(new_variance, _MIN_VARIANCE), MAX_VARIANCE)


@dataclass
class Strata:
    """Moments of every stratum and of all strata together."""

    _moments_by_stratum: dict[Stratum, Moments] = field(default_factory=dict, init=False)
    _shared_moments: Moments = field(default_factory=Moments, init=False)

    def prior(self, stratum: Stratum) -> tuple[float, float]:
        """Return the mean and the variance of ψ of a prompt that was never sampled."""
        mean, variance = self._shared_moments.shrink_towards(
            MAX_ANGLE / 2, MAX_VARIANCE, _UNINFORMATIVE_WEIGHT
        )
        moments = self._moments_by_stratum.get(stratum, Moments())
        return moments.shrink_towards(mean, variance, _SHARED_WEIGHT)

    def add(self, stratum: Stratum, angle: float, noise: float) -> None:
        """Add the first group of a prompt."""
        self._moments_by_stratum.setdefault(stratum, Moments()).add(angle, noise)
        self._shared_moments.add(angle, noise)

    def decay(self, steps: int) -> None:
        """Reduce the weight of past groups by `steps` steps."""
        factor = _DECAY**steps
        self._shared_moments.decay(factor)
        for moments in self._moments_by_stratum.values():
            moments.decay(factor)

    def state(self) -> StrataState:
        """Return the sums: first of all strata together, then of each stratum."""
        by_stratum = (
            (task, tag, moments.sums()) for (task, tag), moments in self._moments_by_stratum.items()
        )
        return (("", "", self._shared_moments.sums()), *by_stratum)

    def restore(self, state: StrataState) -> None:
        self._shared_moments = Moments(*state[0][2])
        self._moments_by_stratum = {(task, tag): Moments(*sums) for task, tag, sums in state[1:]}
