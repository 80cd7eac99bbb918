"""Process noise: the growth of a belief's variance per step, in rad²."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.prompts.selection.beliefs.arcsine import Floats, Mask
from megatron_rl.prompts.selection.beliefs.strata import Stratum

ProcessNoiseState = tuple[tuple[str, str, tuple[float, float]], ...]
_Sums = tuple[float, float]

MIN_RATE = 2e-4
MAX_RATE = 0.02
_DECAY = 0.98  # factor per step of the weight of past observations
_MIN_RATE_WEIGHT = 2e6  # weight of MIN_RATE in the shared rate: a deviation of 0.001
_SHARED_WEIGHT = 1e6  # weight of the shared rate in the rate of a stratum


def excess_variance(errors: Floats, expected_variances: Floats, is_mixed: Mask) -> Floats:
    """Return e² - V - R, by how much squared errors exceed their expectation.

    A group that is not mixed cannot miss by its nominal noise R. If its error is smaller than
    expected, it carries no information and the excess is 0.
    """
    excess = errors * errors - expected_variances
    return np.where(is_mixed, excess, np.maximum(excess, 0.0))


@dataclass
class ProcessNoise:
    """Estimate of the process noise q of each stratum, by weighted regression.

    e² - V - R is regressed on Δt with weights 1 / S², S = V + q Δt + R, over prompts
    with earlier groups. The sums are Σ Δt (e² - V - R) / S² and Σ Δt² / S², for each stratum and
    for all together, with an exponential decay of 2 % per step.
    """

    _sums_by_stratum: dict[Stratum, _Sums] = field(default_factory=dict, init=False)
    _shared_sums: _Sums = field(default=(0.0, 0.0), init=False)

    def rate(self, stratum: Stratum) -> float:
        """Return q of a stratum, in rad² per step, shrunk towards the shared rate."""
        products, squares = self._sums_by_stratum.get(stratum, (0.0, 0.0))
        products += _SHARED_WEIGHT * self.shared_rate
        return _clip_rate(products / (squares + _SHARED_WEIGHT))

    @property
    def shared_rate(self) -> float:
        """q of all strata together, shrunk towards the smallest rate."""
        products, squares = self._shared_sums
        products += _MIN_RATE_WEIGHT * MIN_RATE
        return _clip_rate(products / (squares + _MIN_RATE_WEIGHT))

    def learn(
        self, strata: Sequence[Stratum], steps: Floats, excess: Floats, variances: Floats
    ) -> None:
        """Add observations.

        steps: Δt, steps since each prompt's previous group. 0 for observations to ignore.
        excess: e² - V - R, see `excess_variance`.
        variances: S = V + q Δt + R, as predicted.
        """
        products = steps * excess / variances**2
        squares = (steps / variances) ** 2
        for index, stratum in enumerate(strata):
            sums = (float(products[index]), float(squares[index]))
            stratum_sums = self._sums_by_stratum.get(stratum, (0.0, 0.0))
            self._shared_sums = _add(self._shared_sums, sums)
            self._sums_by_stratum[stratum] = _add(stratum_sums, sums)

    def decay(self, steps: int) -> None:
        """Reduce the weight of past observations by `steps` steps."""
        factor = _DECAY**steps
        self._shared_sums = _scale(self._shared_sums, factor)
        self._sums_by_stratum = {
            stratum: _scale(sums, factor) for stratum, sums in self._sums_by_stratum.items()
        }

    def state(self) -> ProcessNoiseState:
        """Return the sums: first of all strata together, then of each stratum."""
        by_stratum = ((task, tag, sums) for (task, tag), sums in self._sums_by_stratum.items())
        return (("", "", self._shared_sums), *by_stratum)

    def restore(self, state: ProcessNoiseState) -> None:
        """Restore sums. An empty state belongs to a run that learned none."""
        self._shared_sums = state[0][2] if state else (0.0, 0.0)
        self._sums_by_stratum = {(task, tag): sums for task, tag, sums in state[1:]}


def _clip_rate(rate: float) -> float:
    return min(max(rate, MIN_RATE), MAX_RATE)


def _add(first: _Sums, second: _Sums) -> _Sums:
    return first[0] + second[0], first[1] + second[1]


def _scale(sums: _Sums, factor: float) -> _Sums:
    return factor * sums[0], factor * sums[1]
