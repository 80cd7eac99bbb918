"""Kernels compile in warm-up, not in the steps: see `tests.training.compilations`."""

import json
import subprocess
import sys

import pytest

from tests.kernels.processes import ROOT, importable


@pytest.mark.parametrize(
    ("dtype", "steps"),
    [
        pytest.param("bfloat16", 2, marks=[pytest.mark.slow, pytest.mark.timeout(400)]),
        pytest.param("bfloat16", 40, marks=[pytest.mark.nightly, pytest.mark.timeout(900)]),
        pytest.param("float32", 40, marks=[pytest.mark.nightly, pytest.mark.timeout(900)]),
    ],
)
def test_steps_use_the_kernels_that_warm_up_compiled(dtype: str, steps: int) -> None:
    """A first use of a kernel in a step would stall all ranks for the time of its compilation."""
    pytest.importorskip("triton")
    process = subprocess.run(
        [sys.executable, "-m", "tests.training.compilations", dtype, str(steps)],
        cwd=ROOT,
        env=importable(),
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert process.returncode == 0, process.stderr
    counts = json.loads(process.stdout.splitlines()[-1])
    assert len(counts["kernels"]) == 8
    assert counts["warm_up"] == 8
    assert counts["later"] == 0
