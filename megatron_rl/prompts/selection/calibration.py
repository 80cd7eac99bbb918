"""Whether as many groups are mixed as were predicted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_STEPS = 20
_GROUPS = 100  # in the window, before it says anything
_APART = 0.1


@dataclass
class Calibration:
    """window: (sum of the predicted chances, mixed groups, groups) of the last 20 steps; groups
    with verdicts alone.
    """

    window: deque[tuple[float, float, float]] = field(default_factory=deque)

    def add(self, predicted: float, mixed: float, groups: float) -> None:
        """One step's."""
        self.window.append((predicted, mixed, groups))
        while len(self.window) > _STEPS:
            self.window.popleft()

    def metrics(self) -> dict[str, float]:
        """Means of the last step, and by how much those of the window are apart where that is an
        alarm (else 0).
        """
        predicted, mixed, groups = self.window[-1]
        sums = [sum(column) for column in zip(*self.window, strict=True)]
        apart = abs(sums[0] - sums[1]) / max(sums[2], 1.0)
        return {
            "select/predicted_mixed": predicted / max(groups, 1.0),
            "select/observed_mixed": mixed / max(groups, 1.0),
            "select/miscalibrated": apart if sums[2] >= _GROUPS and apart > _APART else 0.0,
        }
