"""Drift that all prompts share, estimated from prompts with earlier groups."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megatron_rl.prompts.selection.beliefs.arcsine import Floats, Mask

_DECAY = 0.98  # factor per step of the weight of past observations
_ZERO_WEIGHT = 2.5e5  # weight of the prior: no drift, with a deviation of 0.002 rad per step
_MAX_RATE = 0.02  # rad per step


@dataclass
class SharedDrift:
    """Estimate of the drift v, in rad per step, by weighted regression.

    z - μ is regressed on h = Δt sin 2μ with weights 1 / (V + R). The sums are
    Σ h (z - μ) / (V + R) and Σ h² / (V + R), with an exponential decay of 2 % per step.
    """

    _products: float = field(default=0.0, init=False)
    _squares: float = field(default=0.0, init=False)

    @property
    def rate(self) -> float:
        """v, within ±0.02."""
        return float(
            np.clip(self._products / (self._squares + _ZERO_WEIGHT), -_MAX_RATE, _MAX_RATE)
        )

    def decay(self, steps: int) -> None:
        """Reduce the weight of past observations by `steps` steps."""
        factor = _DECAY**steps
        self._products *= factor
        self._squares *= factor

    def learn(
        self, is_usable: Mask, means: Floats, steps: Floats, angles: Floats, variances: Floats
    ) -> None:
        """Add observations.

        is_usable: False for observations to ignore.
        means: μ, as of each prompt's previous group.
        steps: Δt, steps since then.
        angles: z, observed ψ.
        variances: V + R, expected variances of z - μ.
        """
        slopes = np.where(is_usable, steps * np.sin(2 * means), 0.0)
        self._products += float(np.sum(slopes * (angles - means) / variances))
        self._squares += float(np.sum(slopes * slopes / variances))

    def state(self) -> tuple[float, float]:
        return self._products, self._squares

    def restore(self, state: tuple[float, float]) -> None:
        self._products, self._squares = state
