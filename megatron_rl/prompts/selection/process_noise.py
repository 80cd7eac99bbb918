"""How far pass rates wander by themselves: by how much the variance of a belief grows per step, in
rad².
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatron_rl.prompts.selection.arcsine import Floats
from megatron_rl.prompts.selection.strata import Stratum

WanderState = tuple[tuple[str, str, tuple[float, float]], ...]
SLOWEST = 2e-4
FASTEST = 0.02
_KEPT = 0.98  # of the weight, per step, of what it was learnt from
_ASSUMED = 2e6  # the weight of SLOWEST in that of all strata: a deviation of 0.001
_BORROWED = 1e6  # the weight of that of all strata in that of one


def surprise(missed: Floats, expected: Floats, mixed: npt.NDArray[np.bool_]) -> Floats:
    """e² - V - R, where e is what was missed; a flat group that surprises nobody says nothing: it
    cannot miss by R.
    """
    more = missed * missed - expected
    return np.where(mixed, more, np.maximum(more, 0.0))


@dataclass
class ProcessNoise:
    """q, learnt from prompts that were seen before: the regression of e² - V - R on Δt, weighted by
    1 / (V + qΔt + R)².

    Kept for every stratum and for all together: Σ Δt (e² - V - R) / S² and Σ Δt² / S², discounted.
    """

    _of: dict[Stratum, tuple[float, float]] = field(default_factory=dict)
    _all: tuple[float, float] = (0.0, 0.0)

    def of(self, stratum: Stratum) -> float:
        """q, in rad² a step, with a weight of that of all strata mixed in."""
        moved, weight = self._of.get(stratum, (0.0, 0.0))
        return _within((moved + _BORROWED * self.shared) / (weight + _BORROWED))

    @property
    def shared(self) -> float:
        """q of all strata."""
        moved, weight = self._all
        return _within((moved + _ASSUMED * SLOWEST) / (weight + _ASSUMED))

    def learn(
        self, strata: Sequence[Stratum], steps: Floats, more: Floats, variances: Floats
    ) -> None:
        """more: e² - V - R of each (see `surprise`); variances: V + qΔt + R as it was expected."""
        moved, weight = steps * more / variances**2, (steps / variances) ** 2
        for place, stratum in enumerate(strata):
            one = float(moved[place]), float(weight[place])
            self._all, self._of[stratum] = (
                _sum(self._all, one),
                _sum(self._of.get(stratum, (0.0, 0.0)), one),
            )

    def fade(self, steps: int) -> None:
        """What was learnt before weighs less: 0.98 for each step."""
        kept = _KEPT**steps
        self._all = kept * self._all[0], kept * self._all[1]
        self._of = {
            stratum: (kept * moved, kept * weight) for stratum, (moved, weight) in self._of.items()
        }

    def state(self) -> WanderState:
        """Those of all together first."""
        return (("", "", self._all), *((task, tag, sums) for (task, tag), sums in self._of.items()))

    def restore(self, state: WanderState) -> None:
        """An empty state is of a run that learnt none."""
        self._all = state[0][2] if state else (0.0, 0.0)
        self._of = {(task, tag): sums for task, tag, sums in state[1:]}


def _within(growth: float) -> float:
    return min(max(growth, SLOWEST), FASTEST)


def _sum(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return one[0] + other[0], one[1] + other[1]
