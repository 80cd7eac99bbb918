"""What given pass rates say of prompts that were never drawn, and how far that, or another run's
belief, is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.prompts.pass_rates import PassRate
from megatron_rl.prompts.selection.arcsine import HIGHEST, WIDEST, observation, updated

_KEPT = 0.99  # of the weight, per step, of what the doubt was learnt from
_ASSUMED = 8.0  # groups' worth of rates that are right
_WIDENED = 100.0  # groups' worth of knowing nothing


@dataclass
class PassRatePrior:
    """rates: by prompt id; those without samples say nothing.

    The doubt is a variance, in rad², by which the rates, and beliefs of another run, are further
    from what is drawn than counting explains: they may be another model's. It is the discounted
    mean of e² - V - R over the first groups of such prompts.
    """

    rates: Mapping[str, PassRate] = field(default_factory=dict)
    _learnt: tuple[float, float] = (0.0, 0.0)  # the sum of that, and how many

    def of(self, prompt_id: str) -> tuple[float, float] | None:
        """Mean and variance of ψ as after one group of so many samples, of which nothing was known;
        None: no rate.
        """
        rate = self.rates.get(prompt_id)
        if rate is None or not rate.samples:
            return None
        right, samples = np.array([float(rate.right)]), np.array([float(rate.samples)])
        seen = observation(right, samples, (right > 0) & (right < samples))
        mean, variance = updated(np.array([HIGHEST / 2]), np.array([WIDEST]), *seen)
        return float(mean[0]), float(variance[0])

    @property
    def doubt(self) -> float:
        """What their variances grow by, in rad²."""
        total, count = self._learnt
        return min(max(total / (count + _ASSUMED), 0.0), WIDEST)

    def learn(self, more: float) -> None:
        """more: e² - V - R of the first group of a rated prompt (see `surprise`), V without the
        doubt.
        """
        self._learnt = self._learnt[0] + more, self._learnt[1] + 1

    def fade(self, steps: int) -> None:
        """What was learnt before weighs less: 0.99 for each step."""
        kept = _KEPT**steps
        self._learnt = kept * self._learnt[0], kept * self._learnt[1]

    def widen(self) -> None:
        """They lose their certainty, until first groups show that they have it."""
        self._learnt = weak_prior(_WIDENED)

    def state(self) -> tuple[float, float]:
        return self._learnt

    def restore(self, state: tuple[float, float]) -> None:
        self._learnt = state


def weak_prior(groups: float) -> tuple[float, float]:
    """The state in which nothing that was given is believed, until about so many first groups bear
    it out.
    """
    return (groups + _ASSUMED) * WIDEST, groups
