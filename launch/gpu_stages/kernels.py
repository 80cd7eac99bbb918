"""The kernels against their float64 references: the tests of the Triton kernels, compiled."""

from __future__ import annotations

import re
import subprocess
import sys

from launch.gpu_stages.stage import Report, Setting, run

_ON_GPU = ("tests/kernels/triton", "tests/kernels/test_kernels_on_gpu.py")
_SMALL = ("tests/kernels/test_espo_golden.py", "tests/kernels/test_policy_loss_reference.py")


def kernels(setting: Setting, report: Report) -> None:
    """Run pytest in this process's place and count."""
    plain = (
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "no:xdist.looponfail",
    )  # one process, nothing written
    command = [sys.executable, "-m", "pytest", "-q", *plain, "--maxfail=20"]
    done = subprocess.run(
        [*command, *(_SMALL if setting.small else _ON_GPU)], capture_output=True, text=True
    )
    print(done.stdout[-20_000:], done.stderr[-4_000:])
    for outcome in ("passed", "failed", "error", "skipped"):
        found = re.findall(rf"(\d+) {outcome}", done.stdout)
        report.note(outcome, int(found[-1]) if found else 0)
    report.holds("pytest_succeeded", done.returncode == 0)
    report.holds("some_passed", report.values["passed"] > 0)


if __name__ == "__main__":
    run(kernels)
