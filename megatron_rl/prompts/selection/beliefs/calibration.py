"""Calibration of the beliefs: predicted against observed numbers of mixed groups."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_NUM_STEPS = 20
# A window with fewer groups is too small for a verdict.
_MIN_GROUPS = 100
# A smaller difference between the predicted and the observed share is no miscalibration.
_MIN_DIFFERENCE = 0.1


@dataclass
class Calibration:
    """Numbers of the last 20 steps.

    window: (sum of the predicted probabilities, number of mixed groups, number of groups) of each
    step. Only groups with enough verdicts count.
    """

    window: deque[tuple[float, float, float]] = field(default_factory=deque)

    def add(self, predicted_mixed: float, observed_mixed: float, groups: float) -> None:
        """Add the numbers of one step."""
        self.window.append((predicted_mixed, observed_mixed, groups))
        while len(self.window) > _NUM_STEPS:
            self.window.popleft()

    def metrics(self) -> dict[str, float]:
        """Return the predicted and the observed share of mixed groups of the last step.

        select/miscalibrated is the difference of both shares over the window if it is large, else
        0. select/calibration_steps is the number of steps in the window.
        """
        predicted_mixed, observed_mixed, groups = self.window[-1]
        predicted_sum, observed_sum, group_sum = (
            sum(column) for column in zip(*self.window, strict=True)
        )
        difference = abs(predicted_sum - observed_sum) / max(group_sum, 1.0)
        is_miscalibrated = group_sum >= _MIN_GROUPS and difference > _MIN_DIFFERENCE
        return {
            "select/predicted_mixed": predicted_mixed / max(groups, 1.0),
            "select/observed_mixed": observed_mixed / max(groups, 1.0),
            "select/miscalibrated": difference if is_miscalibrated else 0.0,
            "select/calibration_steps": float(len(self.window)),
        }
