"""Calibration of the beliefs over a window of steps."""

import pytest

from megatron_rl.prompts.selection.beliefs.calibration import Calibration


@pytest.mark.parametrize(("steps", "num_measured"), [(1, 1), (5, 5), (20, 20), (33, 20)])
def test_the_number_of_measured_steps_is_reported(steps: int, num_measured: int) -> None:
    calibration = Calibration()
    for _ in range(steps):
        calibration.add(predicted_mixed=30.0, observed_mixed=50.0, groups=100.0)
    metrics = calibration.metrics()
    assert metrics["select/calibration_steps"] == num_measured
    assert metrics["select/miscalibrated"] == pytest.approx(0.2)
