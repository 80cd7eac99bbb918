"""Runs `triton/`, and the Triton cases of `test_unchecked_values.py`, under Triton's interpreter in
its own process.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.processes import ROOT, importable


@pytest.mark.slow
@pytest.mark.timeout(930)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run compiled on this machine")
def test_triton_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    tests = [str(Path(__file__).with_name(name)) for name in ("triton", "test_unchecked_values.py")]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "triton", *tests],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        env=importable(TRITON_INTERPRET="1"),
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert " passed" in process.stdout
    assert "skipped" not in process.stdout
