"""Runs `triton/` under Triton's interpreter, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.processes import ROOT, importable


@pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run compiled on this machine")
def test_triton_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    folder = Path(__file__).with_name("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        env=importable(TRITON_INTERPRET="1"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
