"""Accesses out of bounds in the Triton kernels, which compute-sanitizer's memcheck reports.

Each kernel is launched by a test that is short. A program that writes behind a tensor comes first:
a tool that does not report it cannot say anything about the kernels.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from tests.lab.gpu_stages.stage import Report, Setting, StageSkipped, run

ROOT = Path(__file__).resolve().parents[3]
TOOL = "compute-sanitizer"
_TOOL_FOLDERS = (Path("/usr/local/cuda/bin"), Path("/usr/local/cuda/compute-sanitizer"))
# Errors of CUDA functions do not count: torch asks for functions that a driver may not have.
_OPTIONS = (
    *("--tool", "memcheck"),
    *("--target-processes", "application-only"),
    *("--report-api-errors", "no"),
)
_PLUGINS = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:xdist.looponfail")
CONTROL = "tests/lab/gpu_check/out_of_bounds.py"
CONTROL_KERNEL = "out_of_bounds_kernel"
# Kernels by the test that launches them
_TRITON = "tests/kernels/triton"
TESTS = {
    f"{_TRITON}/test_triton_logprob.py::test_gradient_can_overwrite_the_logits": (
        "logprob_entropy_kernel",
        "logits_gradient_kernel",
    ),
    f"{_TRITON}/test_triton_quantize.py::test_same_bits_as_the_reference[True-dtype1]": (
        "quantize_fp8_blockwise_kernel",
    ),
    f"{_TRITON}/test_triton_objective.py::test_several_blocks_and_each_kind_of_denominator[None]": (
        "espo_digits_kernel",
        "espo_groups_kernel",
        "espo_widths_kernel",
        "espo_sequence_kernel",
        "espo_reduction_kernel",
        "scale_gradient_kernel",
    ),
    f"{_TRITON}/test_triton_context.py::test_two_ranks_add_up_to_the_whole[3.0-current]": (
        "espo_group_sums_kernel",
    ),
}
_REPORT_S = 5.0  # seconds that the rest of the stage needs after the last run
_LONGEST_RUN_S = 120.0
_SUMMARY = re.compile(r"^=+ ERROR SUMMARY: (\d+) error", re.M)
_OWN_ERROR = re.compile(r"^=+ (?:Internal Sanitizer )?Error: .*", re.M)
_PASSED = re.compile(r"\b1 passed\b")


def sanitizer(
    setting: Setting, report: Report, tool_folders: Sequence[Path] = _TOOL_FOLDERS
) -> None:
    """Run memcheck over a test of each kernel, and note the errors of each.

    tool_folders: where the tool may be if it is not on PATH.
    """
    if setting.small or not torch.cuda.is_available():
        raise StageSkipped(f"{TOOL} needs a GPU")
    folders = os.pathsep.join(map(str, tool_folders))
    tool = shutil.which(TOOL) or shutil.which(TOOL, path=folders)
    if tool is None:
        raise StageSkipped(f"{TOOL} is not on PATH, nor where CUDA's toolkit usually is")
    command = [tool, *_OPTIONS, sys.executable]
    _require_report_of_the_control(command, setting, report)
    obstacles = []
    for position, (test, kernels) in enumerate(TESTS.items()):
        output = _run(
            [*command, *pytest_words(test)],
            setting.scratch,
            _fair_share(setting, len(TESTS) - position),
        )
        obstacles.append(_note_kernels(test, kernels, output, report))
    if all(obstacles):
        raise StageSkipped(f"{TOOL} checked no kernel: {obstacles[0]}")


def pytest_words(*tests: str) -> list[str]:
    """Return Python's arguments that run tests without plugins that start processes or write."""
    return ["-m", "pytest", "-q", *_PLUGINS, *tests]


def _fair_share(setting: Setting, runs: int) -> float:
    """Seconds for the next of several runs that are left."""
    return min(_LONGEST_RUN_S, max(1.0, setting.remaining_seconds - _REPORT_S) / runs)


def _require_report_of_the_control(
    command: Sequence[str], setting: Setting, report: Report
) -> None:
    """Skip the stage unless the tool reports a write behind a tensor."""
    output = _run([*command, CONTROL], setting.scratch, _fair_share(setting, len(TESTS) + 1))
    errors = _errors_at(CONTROL_KERNEL, output)
    report.note("errors in a program that writes out of bounds", errors)
    if not errors:
        reason = _obstacle(output) or "it does not report a write out of bounds"
        raise StageSkipped(f"{TOOL} cannot check here: {reason}")


def _run(command: Sequence[str], scratch: Path, limit: float) -> str:
    """Run a program for at most `limit` seconds. Returns and prints its output.

    Each tensor gets an allocation of its own. In torch's large ones, memcheck would not see an
    access to a neighbour.
    """
    log = scratch / "output.txt"
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    is_late = False
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            is_late = True
            _kill(process)
    output = log.read_text(errors="replace")
    if is_late:
        output += f"\nit took longer than {limit:.0f} s"
    print(" ".join(command), output[-8_000:], sep="\n", flush=True)
    return output


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the tool and the program that it runs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        tool = psutil.Process(process.pid)
        tool.suspend()  # so that it starts no program meanwhile
        for child in tool.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()


def _note_kernels(test: str, kernels: Sequence[str], output: str, report: Report) -> str:
    """Note the errors of each kernel of a test. Returns why it could not be checked, or "".

    An error ends the program, so that kernels after it are not checked.
    """
    summary = _SUMMARY.findall(output)
    errors = int(summary[-1]) if summary else 0
    at = {kernel: _errors_at(kernel, output) for kernel in kernels}
    obstacle = "" if summary and _PASSED.search(output) else _obstacle(output)
    for kernel in kernels:
        if at[kernel] or not (errors or obstacle):
            report.require_at_most(f"{kernel} errors", at[kernel], 0)
        else:
            report.note(f"{kernel} errors", f"not checked: {obstacle or 'another kernel failed'}")
    elsewhere = errors - sum(at.values())
    if elsewhere > 0:
        report.require_at_most(f"errors elsewhere in {test}", elsewhere, 0)
    return "" if errors else obstacle


def _errors_at(kernel: str, output: str) -> int:
    """The number of accesses that the tool reports of a kernel."""
    return len(re.findall(rf"^=+ +at .*\b{kernel}\b", output, re.M))


def _obstacle(output: str) -> str:
    """The tool's own error, or else the last line that the program printed."""
    own_error = _OWN_ERROR.search(output)
    if own_error is not None:
        return own_error[0].strip("= ")[:200]
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("===")]
    return lines[-1].strip()[:200] if lines else "it printed nothing"


if __name__ == "__main__":
    run(sanitizer)
