"""The stage `state` compares steps as exactly as a repetition of the step allows."""

from __future__ import annotations

import pytest
import torch

from tests.lab.gpu_stages.stage import Report
from tests.lab.gpu_stages.state import compare_steps

NAMES = [f"optimizer.state.{kind}.a 0" for kind in ("param", "exp_avg", "exp_avg_sq")]


def step(change: float, noise: float = 0.0) -> dict[str, torch.Tensor]:
    """Tensors after a step that changes each value by `change`, and one by `noise` more."""
    tensor = torch.full((100,), 1.0 + change)
    tensor[0] += noise
    return {name: tensor.clone() for name in NAMES}


@pytest.mark.parametrize(
    ("result", "repetition", "compared", "is_right"),
    [
        (step(0.5), step(0.5), "bits", True),
        (step(0.5, 1e-6), step(0.5, 1e-6), "bits", False),
        (step(0.5, 1e-3), step(0.5), "within rounding", True),
        (step(0.6), step(0.5), "within rounding", False),
    ],
)
def test_a_resumed_step_iscompare_stepsd_as_exactly_as_it_repeats(
    result: dict[str, torch.Tensor],
    repetition: dict[str, torch.Tensor],
    compared: str,
    is_right: bool,
) -> None:
    report = Report()
    compare_steps(result, step(0.5), repetition, step(0.0), report)
    assert report.values["compared"] == compared
    assert (not report.problems) == is_right, report.problems
    assert ("resumed_equals_uninterrupted" in report.values) == (compared == "bits")
