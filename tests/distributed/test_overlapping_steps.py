"""Collectives that overlap with passes change nothing that a run can see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.torchrun import torchrun

SCRIPT = Path(__file__).with_name("overlapping_steps.py")
DTYPES = ("float32", "bfloat16")


@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("ranks", "grids", "dtypes"),
    [
        pytest.param(2, ("ep2",), ("bfloat16",), id="2"),
        pytest.param(2, ("dp", "ep2"), DTYPES, marks=pytest.mark.nightly, id="2-all"),
        pytest.param(4, ("pp2", "pp2_vpp2"), DTYPES, marks=pytest.mark.nightly, id="4"),
    ],
)
def test_steps_are_the_same_with_and_without_overlap(
    tmp_path: Path, ranks: int, grids: tuple[str, ...], dtypes: tuple[str, ...]
) -> None:
    """Log-probabilities, weights and resumed weights are equal bit for bit.

    Passes between steps, exports and checkpoints see the weights of the last step.
    """
    out = tmp_path / "steps.json"
    cases = [f"{grid},{dtype}" for grid in grids for dtype in dtypes]
    torchrun(SCRIPT, str(out), *cases, ranks=ranks, timeout=540)
    results: dict[str, Any] = json.loads(out.read_text())
    assert len(results) == 2 * len(cases)
    for grid in grids:
        for dtype in dtypes:
            none, both = (results[f"{grid} {dtype} {overlap}"] for overlap in (False, True))
            # Dense weights, and experts if their replicas are others
            assert none["gathers"] == len(none["buckets"]) * (2 if grid == "ep2" else 1)
            compare(none, both)


def compare(none: dict[str, Any], overlap: dict[str, Any]) -> None:
    assert overlap["buckets"][0] > 1 and none["buckets"][0] == 1
    assert len(set(none["seen"]["weights"])) == 4, "every step changes weights"
    assert overlap["seen"].pop("norms") == pytest.approx(none["seen"]["norms"], rel=1e-6)
    assert overlap["seen"].items() <= none["seen"].items()
