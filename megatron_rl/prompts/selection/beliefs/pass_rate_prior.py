"""Initial beliefs from given pass rates, and the extra variance that reflects their reliability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.prompts.pass_rates import PassRate
from megatron_rl.prompts.selection.beliefs.arcsine import (
    MAX_ANGLE,
    MAX_VARIANCE,
    observation,
    update,
)

_DECAY = 0.99  # factor per step of the weight of past observations
_ZERO_WEIGHT = 8.0  # weight of the prior that the rates need no extra variance, in groups
_INFLATED_WEIGHT = 100.0  # weight of an uninformative prior after `inflate_variance`, in groups


@dataclass
class PassRatePrior:
    """Initial beliefs from given pass rates.

    The rates, and beliefs of another run, may come from another model. Their variance therefore
    grows by an extra variance, in rad²: by how much first groups miss them beyond the expected
    variance. It is the mean of e² - V - R over the first groups of such prompts, with an
    exponential decay of 1 % per step.

    rates: pass rates by prompt id. Those without samples are ignored.
    """

    rates: Mapping[str, PassRate] = field(default_factory=dict)
    _excess_sum: float = field(default=0.0, init=False)
    _weight: float = field(default=0.0, init=False)

    def estimate(self, prompt_id: str) -> tuple[float, float] | None:
        """Return the mean and the variance of ψ by a prompt's rate, or None without a rate.

        They equal an uninformative belief after one group of as many samples.
        """
        rate = self.rates.get(prompt_id)
        if rate is None or not rate.samples:
            return None
        correct = np.array([float(rate.correct)])
        samples = np.array([float(rate.samples)])
        angle, noise = observation(correct, samples, (correct > 0) & (correct < samples))
        mean, variance = update(np.array([MAX_ANGLE / 2]), np.array([MAX_VARIANCE]), angle, noise)
        return float(mean[0]), float(variance[0])

    @property
    def extra_variance(self) -> float:
        """Variance that is added to given estimates, in rad²."""
        return min(max(self._excess_sum / (self._weight + _ZERO_WEIGHT), 0.0), MAX_VARIANCE)

    def learn(self, excess: float) -> None:
        """Add the first group of a prompt with a given estimate.

        excess: e² - V - R (see `excess_variance`), with V without the extra variance.
        """
        self._excess_sum += excess
        self._weight += 1

    def decay(self, steps: int) -> None:
        """Reduce the weight of past observations by `steps` steps."""
        factor = _DECAY**steps
        self._excess_sum *= factor
        self._weight *= factor

    def inflate_variance(self) -> None:
        """Make given estimates uninformative until first groups confirm them."""
        self.restore(uninformative_state(_INFLATED_WEIGHT))

    def state(self) -> tuple[float, float]:
        return self._excess_sum, self._weight

    def restore(self, state: tuple[float, float]) -> None:
        self._excess_sum, self._weight = state


def uninformative_state(weight: float) -> tuple[float, float]:
    """Return a state in which given estimates are uninformative.

    weight: number of first groups that outweigh it.
    """
    return (weight + _ZERO_WEIGHT) * MAX_VARIANCE, weight
