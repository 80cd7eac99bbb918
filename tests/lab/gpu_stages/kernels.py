"""Kernels compared with their float64 references: the tests of the Triton kernels, compiled."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading

from tests.lab.gpu_stages.stage import Report, Setting, run

_GPU_TESTS = ("tests/kernels/triton", "tests/kernels/test_kernels_on_gpu.py")
_SMALL_TESTS = ("tests/kernels/test_espo_golden.py", "tests/kernels/test_policy_loss_reference.py")
# One process, and no files of pytest. A line for each test shows how far it came.
_OPTIONS = ("-v", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:xdist.looponfail")
_REPORT_S = 8.0  # seconds that pytest needs to print its failures


def kernels(setting: Setting, report: Report) -> None:
    """Run pytest and count the outcomes. Shortly before the limit, pytest is interrupted."""
    tests = _SMALL_TESTS if setting.small else _GPU_TESTS
    command = [sys.executable, "-m", "pytest", *_OPTIONS, "--maxfail=20", "--durations=10", *tests]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    seconds = max(setting.remaining_seconds - _REPORT_S, 0.0)
    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), _interrupt, [process, report])
    timer.start()
    output = ""
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        output += line
    code = process.wait()
    timer.cancel()
    for outcome in ("passed", "failed", "error", "skipped"):
        report.note(outcome, len(re.findall(rf" {outcome.upper()}\b", output)))
    report.note("failures", re.findall(r"^(?:FAILED|ERROR) (\S+)", output, flags=re.MULTILINE))
    report.require("pytest_succeeded", code == 0)
    report.require("some_passed", report.values["passed"] > 0)


def _interrupt(process: subprocess.Popen[str], report: Report) -> None:
    report.note("interrupted", "the limit of the stage came before the last test")
    process.send_signal(signal.SIGINT)


if __name__ == "__main__":
    run(kernels)
