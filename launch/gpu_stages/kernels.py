"""Kernels compared with their float64 references: the tests of the Triton kernels, compiled."""

from __future__ import annotations

import re
import subprocess
import sys

from launch.gpu_stages.stage import Report, Setting, run

_GPU_TESTS = ("tests/kernels/triton", "tests/kernels/test_kernels_on_gpu.py")
_SMALL_TESTS = ("tests/kernels/test_espo_golden.py", "tests/kernels/test_policy_loss_reference.py")
# One process, and no files of pytest
_PLUGINS = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:xdist.looponfail")


def kernels(setting: Setting, report: Report) -> None:
    """Run pytest and count the outcomes."""
    tests = _SMALL_TESTS if setting.small else _GPU_TESTS
    command = [sys.executable, "-m", "pytest", "-q", *_PLUGINS, "--maxfail=20", *tests]
    process = subprocess.run(command, capture_output=True, text=True)
    print(process.stdout[-20_000:], process.stderr[-4_000:])
    for outcome in ("passed", "failed", "error", "skipped"):
        counts = re.findall(rf"(\d+) {outcome}", process.stdout)
        report.note(outcome, int(counts[-1]) if counts else 0)
    report.require("pytest_succeeded", process.returncode == 0)
    report.require("some_passed", report.values["passed"] > 0)


if __name__ == "__main__":
    run(kernels)
